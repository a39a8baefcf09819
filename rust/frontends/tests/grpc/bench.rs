//! A server over drivers of one behaviour, and what comes of requests.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pie_engine::{CompilerSettings, DriverSettings, GrammarSettings, Service, ServiceSettings};
use pie_frontends::grpc::contract::vllm as proto;
use pie_frontends::grpc::contract::vllm::generate_request::Input;
use pie_frontends::grpc::contract::vllm::generate_response::Response;
use pie_frontends::grpc::contract::vllm::vllm_engine_client::VllmEngineClient;
use pie_frontends::grpc::{Contract, Gateway, GatewaySettings, ServedModel};
use tempfile::TempDir;
use tonic::transport::{Channel, Endpoint};
use tonic::{Status, Streaming};

use crate::driver;

/// No test takes nearly as long.
pub(crate) const WATCHDOG: Duration = Duration::from_mins(2);

/// A service, its server, and the folder of its drivers.
pub(crate) struct Bench {
    pub(crate) gateway: Gateway,
    pub(crate) service: Arc<Service>,
    pub(crate) folder: TempDir,
    lines: Arc<Mutex<Vec<String>>>,
}

/// Changes what a bench is made of.
pub(crate) type Change<'a> = &'a dyn Fn(&mut ServiceSettings, &mut GatewaySettings);

impl Bench {
    pub(crate) fn new(behaviour: &str, contract: Contract) -> Self {
        Self::with(behaviour, contract, &|_, _| ())
    }

    pub(crate) fn with(behaviour: &str, contract: Contract, change: Change<'_>) -> Self {
        let folder = TempDir::new().unwrap();
        let lines = Arc::<Mutex<Vec<String>>>::default();
        let script = driver::script(folder.path(), behaviour);
        let mut process = DriverSettings::new(script, folder.path());
        process.devices = vec!["cpu".to_owned()];
        process.ready_timeout = WATCHDOG;
        let log = Arc::clone(&lines);
        let mut settings = ServiceSettings {
            log: Arc::new(move |_, line| log.lock().unwrap().push(line.to_owned())),
            token_bytes: Some(Arc::new(vocabulary())),
            ..ServiceSettings::new(process)
        };
        settings.scheduler.chunk_tokens = 24;
        settings.scheduler.kv_events = true;
        let model = ServedModel {
            model_path: folder.path().display().to_string(),
            served_name: "stand-in".to_owned(),
            model_type: "none".to_owned(),
            architectures: vec!["StandIn".to_owned()],
            weight_version: "first".to_owned(),
            version: "1.2.3".to_owned(),
            ..ServedModel::default()
        };
        let mut server = GatewaySettings::new(contract, model);
        change(&mut settings, &mut server);
        let service = Arc::new(Service::start(&settings).unwrap());
        let ready = service.wait_ready(WATCHDOG);
        assert!(ready.unwrap(), "{}", lines.lock().unwrap().join("\n"));
        let gateway = Gateway::open(Arc::clone(&service), server).unwrap();
        Self {
            gateway,
            service,
            folder,
            lines,
        }
    }

    /// With grammars, whose end is token 0.
    pub(crate) fn with_grammars(contract: Contract) -> Self {
        Self::with_compiler(contract, &CompilerSettings::default())
    }

    /// The same, compiled in another way.
    pub(crate) fn with_compiler(contract: Contract, compiler: &CompilerSettings) -> Self {
        Self::with("serve", contract, &|service, server| {
            service.grammars = Some(GrammarSettings {
                tokens: vocabulary().into(),
                special: vec![(0, "<end>".to_owned())],
                eos_token_ids: vec![0],
                compiler: compiler.clone(),
            });
            server.model.eos_tokens = vec![0];
        })
    }

    pub(crate) async fn channel(&self) -> Channel {
        self.endpoint().connect().await.unwrap()
    }

    pub(crate) fn endpoint(&self) -> Endpoint {
        Endpoint::try_from(format!("http://{}", self.gateway.address())).unwrap()
    }

    pub(crate) async fn vllm(&self) -> VllmEngineClient<Channel> {
        VllmEngineClient::new(self.channel().await)
    }

    /// Waits until something is so.
    pub(crate) async fn until(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        let started = Instant::now();
        while !holds(self) {
            assert!(started.elapsed() < WATCHDOG, "not {what}; {}", self.log());
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Nothing of any request is left.
    pub(crate) async fn until_idle(&self) {
        self.until("idle", |bench| {
            let idle = |stats: &pie_engine::ReplicaStats| {
                (stats.scheduler.running, stats.scheduler.waiting) == (0, 0)
            };
            bench.gateway.open_requests() == 0 && bench.service.stats().iter().all(idle)
        })
        .await;
    }

    pub(crate) fn log(&self) -> String {
        self.lines.lock().unwrap().join("\n")
    }
}

/// Runs a test, which ends.
pub(crate) fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let ended = runtime
        .unwrap()
        .block_on(async { tokio::time::timeout(WATCHDOG, test).await });
    ended.expect("the test hangs");
}

/// Token 5 is `5 `.
pub(crate) fn vocabulary() -> Vec<Box<[u8]>> {
    let text = |token| format!("{token} ").into_bytes().into_boxed_slice();
    (0..driver::VOCABULARY).map(text).collect()
}

/// What a request must bring.
pub(crate) fn expected(prompt: &[u32], output: usize) -> Vec<u32> {
    let mut text = prompt.to_vec();
    for _ in 0..output {
        text.push(driver::next(&text));
    }
    text.split_off(prompt.len())
}

/// A prompt that few others are like.
pub(crate) fn prompt(number: u32) -> Vec<u32> {
    (0..5 + number % 11)
        .map(|at| (at * 7 + number) % 90)
        .collect()
}

/// A greedy request.
pub(crate) fn request(name: &str, prompt: &[u32], output: u32) -> proto::GenerateRequest {
    proto::GenerateRequest {
        request_id: name.to_owned(),
        input: Some(Input::Tokenized(proto::TokenizedInput {
            original_text: String::new(),
            input_ids: prompt.to_vec(),
        })),
        sampling_params: Some(proto::SamplingParams {
            temperature: Some(0.0),
            max_tokens: Some(output),
            ..proto::SamplingParams::default()
        }),
        stream: true,
        ..proto::GenerateRequest::default()
    }
}

/// What came of one sequence.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Story {
    pub(crate) tokens: Vec<u32>,
    pub(crate) chunks: usize,
    pub(crate) complete: Option<proto::GenerateComplete>,
}

impl Story {
    pub(crate) fn end(&self) -> &proto::GenerateComplete {
        self.complete.as_ref().expect("it has no end")
    }
}

/// Everything of a stream; each sequence keeps the contract's order.
pub(crate) async fn collect(
    stream: &mut Streaming<proto::GenerateResponse>,
) -> Result<BTreeMap<u32, Story>, Status> {
    let mut stories = BTreeMap::<u32, Story>::new();
    while let Some(message) = stream.message().await? {
        match message.response.unwrap() {
            Response::Chunk(chunk) => {
                let story = stories.entry(chunk.index).or_default();
                assert_eq!(story.complete, None, "a chunk comes after the end");
                assert!(!chunk.token_ids.is_empty());
                story.tokens.extend(chunk.token_ids);
                story.chunks += 1;
                assert_eq!(chunk.completion_tokens as usize, story.tokens.len());
            }
            Response::Complete(complete) => {
                let story = stories.entry(complete.index).or_default();
                assert_eq!(story.complete, None, "two ends");
                assert_eq!(
                    complete.completion_tokens as usize,
                    complete.output_ids.len()
                );
                story.complete = Some(complete);
            }
        }
    }
    Ok(stories)
}

/// The only sequence of a request.
pub(crate) async fn collect_one(stream: &mut Streaming<proto::GenerateResponse>) -> Story {
    let mut stories = collect(stream).await.unwrap();
    assert_eq!(stories.keys().collect::<Vec<_>>(), [&0]);
    stories.remove(&0).unwrap()
}
