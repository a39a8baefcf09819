//! What a trace gets of requests.

use pie_engine::{TraceParent, TracedRequest};
use pie_frontends::grpc::Contract;
use tonic::Request;

use crate::bench::{Bench, collect, prompt, request, run};

const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

fn bench(behaviour: &str, traces: bool) -> Bench {
    Bench::with(behaviour, Contract::Vllm, &|_, server| {
        server.traces = traces;
    })
}

/// Sends a request of 5 tokens, and reads all of its answer.
async fn send(bench: &Bench, name: &str, samples: u32, parent: Option<&str>) {
    let mut message = request(name, &prompt(1), 5);
    message.sampling_params.as_mut().unwrap().n = samples;
    let mut call = Request::new(message);
    if let Some(parent) = parent {
        let parent = parent.parse().unwrap();
        call.metadata_mut().insert("traceparent", parent);
    }
    let response = bench.vllm().await.generate(call).await.unwrap();
    collect(&mut response.into_inner()).await.unwrap();
}

fn taken(bench: &Bench) -> Vec<TracedRequest> {
    let (requests, lost) = bench.gateway.take_traced();
    assert_eq!(lost, 0);
    requests
}

#[test]
fn a_request_is_traced_unless_its_trace_is_not_recorded() {
    run(async {
        let bench = bench("serve", true);
        send(&bench, "child", 1, Some(PARENT)).await;
        send(&bench, "left out", 1, Some(&PARENT.replace("-01", "-00"))).await;
        send(&bench, "root", 2, None).await;
        send(&bench, "not a parent", 1, Some("00-xyz")).await;
        let [child, root, other] = &taken(&bench)[..] else {
            panic!("three requests")
        };
        assert_eq!(child.parent, TraceParent::parse(PARENT.as_bytes()));
        assert_eq!((root.parent, other.parent), (None, None));
        assert_eq!((&*child.name, &*root.name), ("child", "root"));
        assert_eq!((child.output_tokens, root.output_tokens), (5, 10));
        assert_eq!(child.prompt_tokens as usize, prompt(1).len());
        assert_eq!(root.finish_reasons, ["length", "length"]);
        for request in [child, root, other] {
            let (admitted, first) = (request.admitted_ns.unwrap(), request.first_token_ns);
            let times = [
                request.received_ns,
                admitted,
                first.unwrap(),
                request.ended_ns,
            ];
            assert!(times.is_sorted() && times[0] < times[3], "{times:?}");
            assert_eq!(request.error, None);
        }
        assert_eq!(taken(&bench), []);
    });
}

#[test]
fn what_is_refused_or_given_up_is_traced_too() {
    run(async {
        let bench = bench("serve slow=5", true);
        let mut client = bench.vllm().await;
        let mut wrong = request("wrong", &prompt(1), 5);
        wrong.sampling_params.as_mut().unwrap().logit_bias = [(1 << 20, 1.0)].into();
        client.generate(wrong).await.unwrap_err();
        let mut many = request("many", &prompt(1), 5);
        many.sampling_params.as_mut().unwrap().n = u32::MAX;
        client.generate(many).await.unwrap_err();
        let long = request("too long", &[1; 3000], 5);
        client.generate(long).await.unwrap_err();
        let response = client.generate(request("gone", &prompt(1), 300)).await;
        drop(response.unwrap());
        bench.until_idle().await;
        let found = taken(&bench);
        let kinds = found.iter().map(|request| {
            let error = request.error.as_ref().map(|(kind, _)| *kind);
            (&*request.name, request.finish_reasons[0], error)
        });
        let expected = [
            ("wrong", "abort", Some("refused")),
            ("many", "abort", Some("refused")),
            ("too long", "abort", Some("refused")),
            ("gone", "abort", None),
        ];
        assert_eq!(kinds.collect::<Vec<_>>(), expected);
        assert!(found[0].error.as_ref().unwrap().1.contains("logit_bias"));
    });
}

#[test]
fn nothing_is_kept_where_nothing_is_traced() {
    run(async {
        let bench = bench("serve", false);
        send(&bench, "a", 1, Some(PARENT)).await;
        assert_eq!(taken(&bench), []);
    });
}
