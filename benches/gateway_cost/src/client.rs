//! Streams, and what they cost.

use std::collections::BTreeMap;
use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Instant;

use pie_frontends::grpc::contract::{sglang, vllm};
use serde_json::{Value, json};
use tonic::transport::{Channel, Endpoint};

use crate::ROLE;
use crate::driver::token;

/// What the project asks for.
const BAR_US: f64 = 10.0;
const COMMAND: &str = "make gateway-cost";

#[derive(Clone)]
struct Settings {
    /// Numbers of streams, one after the other.
    streams: Vec<u32>,
    tokens: u32,
    prompt: u32,
    step_us: u64,
    contract: String,
    repeats: u32,
    events: bool,
    json: Option<String>,
    /// For the record.
    commit: String,
    date: String,
}

/// One run.
struct Outcome {
    seconds: f64,
    tokens: u64,
    messages: u64,
    /// µs of each thread of the server.
    cpu: BTreeMap<String, f64>,
}

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let settings = parse()?;
    let mut server = Server::start(&settings)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let (mut rows, mut bars) = (Vec::new(), Vec::new());
    for &streams in &settings.streams {
        let mut least = f64::MAX;
        for repeat in 0..settings.repeats {
            let outcome = runtime.block_on(run(&settings, &mut server, streams, repeat))?;
            let row = report(&settings, streams, &outcome);
            least = least.min(row["us_per_token"].as_f64().unwrap_or(f64::MAX));
            rows.push(row);
        }
        let rounded = (least * 100.0).round() / 100.0;
        bars.push(json!({
            "name": format!("CPU time of runtime and service for a streamed token, {streams} streams, µs"),
            "value": rounded, "bar": format!("at most {BAR_US}"), "ok": rounded <= BAR_US,
        }));
    }
    server.stop()?;
    if let Some(path) = &settings.json {
        let record = json!({
            "check": "gateway_cost", "commit": settings.commit, "device": device()?, "date": settings.date,
            "command": COMMAND, "rows": rows, "bars": bars,
        });
        std::fs::write(path, serde_json::to_string_pretty(&record)? + "\n")?;
    }
    Ok(())
}

/// Name and number of this machine's processors.
fn device() -> Result<String, Box<dyn Error>> {
    let text = std::fs::read_to_string("/proc/cpuinfo")?;
    let names = text.lines().filter(|line| line.starts_with("model name"));
    let name = names
        .filter_map(|line| line.split_once(": "))
        .map(|(_, name)| name)
        .next();
    let cores = std::thread::available_parallelism()?;
    Ok(format!("CPU: {}, {cores} cores", name.unwrap_or("unknown")))
}

fn parse() -> Result<Settings, Box<dyn Error>> {
    use lexopt::prelude::{Long, ValueExt};
    let mut settings = Settings {
        streams: vec![64, 256],
        tokens: 256,
        prompt: 128,
        step_us: 8000,
        contract: "vllm".to_owned(),
        repeats: 3,
        events: false,
        json: None,
        commit: String::new(),
        date: String::new(),
    };
    let mut words = lexopt::Parser::from_env();
    while let Some(word) = words.next()? {
        match word {
            Long("streams") => {
                let list = words.value()?.string()?;
                settings.streams = list.split(',').map(str::parse).collect::<Result<_, _>>()?;
            }
            Long("commit") => settings.commit = words.value()?.string()?,
            Long("date") => settings.date = words.value()?.string()?,
            Long("tokens") => settings.tokens = words.value()?.parse()?,
            Long("prompt") => settings.prompt = words.value()?.parse()?,
            Long("step-us") => settings.step_us = words.value()?.parse()?,
            Long("contract") => settings.contract = words.value()?.string()?,
            Long("repeats") => settings.repeats = words.value()?.parse()?,
            Long("json") => settings.json = Some(words.value()?.string()?),
            Long("events") => settings.events = true,
            other => return Err(other.unexpected().into()),
        }
    }
    Ok(settings)
}

struct Server {
    child: Child,
    output: BufReader<ChildStdout>,
    address: String,
}

impl Server {
    fn start(settings: &Settings) -> Result<Self, Box<dyn Error>> {
        let mut command = Command::new(std::env::current_exe()?);
        command.env(ROLE, "server");
        command.env("GATEWAY_COST_STEP_US", settings.step_us.to_string());
        command.env("GATEWAY_COST_CONTRACT", &settings.contract);
        if settings.events {
            command.env("GATEWAY_COST_EVENTS", "1");
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let output = child.stdout.take().ok_or("no output")?;
        let mut server = Self {
            child,
            output: BufReader::new(output),
            address: String::new(),
        };
        server.address = server.line()?;
        Ok(server)
    }

    fn line(&mut self) -> Result<String, Box<dyn Error>> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        let line = line.trim().to_owned();
        if line.is_empty() {
            return Err("the server has ended".into());
        }
        Ok(line)
    }

    fn cpu(&mut self) -> Result<BTreeMap<String, f64>, Box<dyn Error>> {
        let input = self.child.stdin.as_mut().ok_or("no input")?;
        writeln!(input, "cpu")?;
        Ok(serde_json::from_str(&self.line()?)?)
    }

    fn stop(&mut self) -> Result<(), Box<dyn Error>> {
        drop(self.child.stdin.take());
        self.child.wait()?;
        Ok(())
    }
}

async fn run(
    settings: &Settings,
    server: &mut Server,
    streams: u32,
    repeat: u32,
) -> Result<Outcome, Box<dyn Error>> {
    let endpoint = Endpoint::try_from(format!("http://{}", server.address))?;
    // As the gateway opens it.
    let endpoint = endpoint
        .initial_stream_window_size(256 << 10)
        .initial_connection_window_size(512 << 20)
        .tcp_nodelay(true);
    let channel = endpoint.connect().await?;
    let before = server.cpu()?;
    let started = Instant::now();
    let calls: Vec<_> = (0..streams)
        .map(|number| {
            let (settings, channel) = (settings.clone(), channel.clone());
            tokio::spawn(async move { stream(&settings, channel, repeat, number).await })
        })
        .collect();
    let (mut tokens, mut messages) = (0, 0);
    for call in calls {
        let (got, parts) = call.await?.map_err(|error| error.to_string())?;
        tokens += u64::from(got);
        messages += parts;
    }
    let seconds = started.elapsed().as_secs_f64();
    let after = server.cpu()?;
    let cpu = after
        .into_iter()
        .map(|(name, us)| (name.clone(), us - before.get(&name).unwrap_or(&0.0)))
        .collect();
    Ok(Outcome {
        seconds,
        tokens,
        messages,
        cpu,
    })
}

/// The tokens of a stream, each of which must be the right one, and its messages.
async fn stream(
    settings: &Settings,
    channel: Channel,
    repeat: u32,
    number: u32,
) -> Result<(u32, u64), tonic::Status> {
    let name = format!("{repeat}-{number}");
    // No two share a prefix.
    let prompt: Vec<u32> = std::iter::once(repeat * 1000 + number)
        .chain(1..settings.prompt)
        .collect();
    let (mut got, mut parts) = (0, 0);
    let mut take = |tokens: &[u32]| {
        for &found in tokens {
            assert_eq!(found, token(settings.prompt + got), "of stream {number}");
            got += 1;
        }
        parts += 1;
    };
    if settings.contract == "sglang" {
        use sglang::generate_response::Response;
        let mut client = sglang::sglang_scheduler_client::SglangSchedulerClient::new(channel);
        let request = sglang::GenerateRequest {
            request_id: name,
            tokenized: Some(sglang::TokenizedInput {
                original_text: String::new(),
                input_ids: prompt,
            }),
            sampling_params: Some(sglang::SamplingParams {
                max_new_tokens: Some(settings.tokens),
                top_k: -1,
                ignore_eos: true,
                ..Default::default()
            }),
            stream: true,
            ..Default::default()
        };
        let mut stream = client.generate(request).await?.into_inner();
        while let Some(message) = stream.message().await? {
            match message.response {
                Some(Response::Chunk(chunk)) => take(&chunk.token_ids),
                Some(Response::Complete(end)) => assert_eq!(end.finish_reason, "length"),
                None => {}
            }
        }
    } else {
        use vllm::generate_response::Response;
        let mut client = vllm::vllm_engine_client::VllmEngineClient::new(channel);
        let request = vllm::GenerateRequest {
            request_id: name,
            input: Some(vllm::generate_request::Input::Tokenized(
                vllm::TokenizedInput {
                    original_text: String::new(),
                    input_ids: prompt,
                },
            )),
            sampling_params: Some(vllm::SamplingParams {
                temperature: Some(0.0),
                max_tokens: Some(settings.tokens),
                ignore_eos: true,
                ..Default::default()
            }),
            stream: true,
            ..Default::default()
        };
        let mut stream = client.generate(request).await?.into_inner();
        while let Some(message) = stream.message().await? {
            match message.response {
                Some(Response::Chunk(chunk)) => take(&chunk.token_ids),
                Some(Response::Complete(end)) => assert_eq!(end.finish_reason, "length"),
                None => {}
            }
        }
    }
    assert_eq!(got, settings.tokens, "of stream {number}");
    Ok((got, parts))
}

fn report(settings: &Settings, streams: u32, outcome: &Outcome) -> Value {
    let tokens = outcome.tokens as f64;
    let all: f64 = outcome.cpu.values().sum();
    let part = |names: &str| -> f64 {
        let threads = outcome
            .cpu
            .iter()
            .filter(|(name, _)| name.starts_with(names));
        threads.map(|(_, us)| us).sum::<f64>() / tokens
    };
    let (us, runtime, service) = (all / tokens, part("pie-replica"), part("pie-gateway"));
    println!(
        "{streams} streams, steps of {} µs: {:.0} tokens/s, {:.2} messages a token; {us:.2} µs a token: runtime {runtime:.2}, \
         service {service:.2}",
        settings.step_us,
        tokens / outcome.seconds,
        outcome.messages as f64 / tokens,
    );
    json!({
        "streams": streams, "step_us": settings.step_us, "contract": settings.contract, "tokens": outcome.tokens,
        "tokens_per_s": tokens / outcome.seconds, "messages_per_token": outcome.messages as f64 / tokens,
        "us_per_token": us, "runtime_us": runtime, "service_us": service,
    })
}
