//! A driver without a model: every request's next token is the number of its tokens so far, modulo the vocabulary.

use std::error::Error;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::thread;
use std::time::{Duration, Instant};

use pie_ring::{ExitGuard, RegionLayout, Server, ServerConfig, Wait};
use pie_wire::{ForwardRequest, ForwardResponse, Payload, ResponseFrame, ResponsePayload};
use serde_json::json;

/// Token ids are below it.
pub(crate) const VOCABULARY: u32 = 32_000;
const PAGE: u32 = 16;

/// The token after so many.
pub(crate) const fn token(position: u32) -> u32 {
    position % VOCABULARY
}

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let step = Duration::from_micros(std::env::var("GATEWAY_COST_STEP_US")?.parse()?);
    let place = arguments.iter().position(|word| word == "--config");
    let config = place
        .and_then(|place| arguments.get(place + 1))
        .ok_or("no --config")?;
    let config: toml::Table = fs::read_to_string(config)?.parse()?;
    let group = config["driver"]["group_id"]
        .as_integer()
        .ok_or("no group")?;
    let guard = ExitGuard::install()?;
    let name = format!("/pie_shmem_g{group}");
    let abort = pie_wire::abort_frame(0);
    let mut ring = ServerConfig::new(&name, pie_wire::SCHEMA_HASH, abort.to_vec());
    ring.layout = RegionLayout::new(2, 8 << 20, 1 << 20)?;
    let mut server = Server::create(&ring, &guard)?;
    let caps = json!({
        "total_pages": 65_536, "kv_page_size": PAGE, "swap_pool_size": 0, "max_forward_tokens": 65_536,
        "max_forward_requests": 1024, "max_page_refs": 1 << 20, "max_model_len": 40_960, "vocab_size": VOCABULARY,
        "arch_name": "none",
    });
    let line = json!({"group_id": group, "shmem_name": name, "caps": caps});
    let mut pipe = OpenOptions::new().write(true).open("/proc/self/fd/3")?;
    writeln!(pipe, "{line}\n{{\"ready\":true}}")?;
    drop(pipe);
    let (mut words, mut answer) = (Vec::new(), vec![0; server.layout().response_capacity()]);
    while let Some(lease) = server.wait(Wait::Park)? {
        let until = Instant::now() + step;
        let frame = pie_wire::decode_request(lease.copy_request(&mut words)?)?;
        let length = match frame.payload {
            Payload::Forward(body) => reply(&body, &mut answer)?,
            _ => return Err("only forwards are asked for".into()),
        };
        thread::sleep(until.saturating_duration_since(Instant::now()));
        // A client that has gone needs none.
        let _ = lease.reply(&answer[..length])?;
    }
    Ok(())
}

fn reply(body: &ForwardRequest, answer: &mut [u8]) -> Result<usize, Box<dyn Error>> {
    let mut tokens = Vec::with_capacity(body.context_ids.len());
    let mut ends = vec![0];
    for request in 0..body.context_ids.len() {
        let rows = body.qo_indptr[request + 1] as usize;
        if body.sampler_indptr[request + 1] > body.sampler_indptr[request] {
            tokens.push(token(body.position_ids[rows - 1] + 1));
        }
        ends.push(tokens.len() as u32);
    }
    if tokens.len() == body.context_ids.len() {
        return Ok(pie_wire::encode_fast_tokens(0, &tokens, answer)?);
    }
    let response = ForwardResponse {
        num_requests: body.context_ids.len() as u32,
        tokens,
        tokens_indptr: ends,
        spec_indptr: vec![0; body.context_ids.len() + 1],
        ..ForwardResponse::default()
    };
    let frame = ResponseFrame {
        driver_id: 0,
        aborted: false,
        payload: ResponsePayload::Forward(response),
    };
    Ok(pie_wire::encode_response(&frame, answer)?)
}
