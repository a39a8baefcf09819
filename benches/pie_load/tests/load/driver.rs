//! A driver without a model. It plans every frame as the real one does, and keeps account of every KV slot: what a
//! request sees through its pages must be its own tokens, in order.

use std::collections::HashMap;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::process;
use std::thread;
use std::time::Duration;

use pie_planner::{Limits, Planner};
use pie_ring::{ExitGuard, RegionLayout, Server, ServerConfig, Wait};
use pie_wire::{
    ArchivedPayload, ForwardRequest, ForwardResponse, Payload, ResponseFrame, ResponsePayload,
};
use rustix::process::{Signal, getppid, kill_process};
use serde_json::json;

const PAGE: u32 = 4;
const MOST_REQUESTS: u32 = 5;
const MOST_TOKENS: u32 = 44;
const MOST_PAGE_REFS: u32 = 40;
const TOTAL_PAGES: u32 = 50;
const POSITIONS: u32 = 64;
const VOCABULARY: u32 = 97;

const LIMITS: Limits = Limits {
    page_size: PAGE,
    total_pages: TOTAL_PAGES,
    vocab_size: VOCABULARY,
    max_positions: POSITIONS,
    row_pages: POSITIONS / PAGE,
    max_requests: MOST_REQUESTS,
    chunk_tokens: MOST_TOKENS,
    max_slots: MOST_TOKENS,
    reply_bytes: 1 << 16,
};

/// Drafts of an answer; not all of them are right.
const MOST_DRAFTS: usize = 6;

/// Serves until it is stopped, or fails as the test asks.
pub(crate) fn main(config: &str) {
    let behaviour = std::env::var("PIE_LOAD_TEST_BEHAVIOUR").unwrap();
    let config: toml::Table = fs::read_to_string(config).unwrap().parse().unwrap();
    let group = config["driver"]["group_id"].as_integer().unwrap();
    match &*behaviour {
        "die-early" => {
            eprintln!("no GPU here");
            process::exit(9);
        }
        "never-ready" => thread::sleep(Duration::from_mins(1)),
        "gibberish" => handshake("hello"),
        _ => serve(group, &behaviour),
    }
}

fn handshake(lines: &str) {
    let pipe = OpenOptions::new().write(true).open("/proc/self/fd/3");
    writeln!(pipe.unwrap(), "{lines}").unwrap();
}

fn serve(group: i64, behaviour: &str) {
    // The script has a stuck driver ignore SIGTERM.
    let guard = if behaviour == "stuck" {
        ExitGuard::inert()
    } else {
        ExitGuard::install().unwrap()
    };
    let name = format!("/pie_shmem_g{group}");
    let abort = pie_wire::abort_frame(0);
    let mut ring = ServerConfig::new(&name, pie_wire::SCHEMA_HASH, abort.to_vec());
    let slots = if behaviour == "one-slot" { 1 } else { 2 };
    ring.layout = RegionLayout::new(slots, 1 << 16, 1 << 16).unwrap();
    let mut server = Server::create(&ring, &guard).unwrap();
    let caps = json!({
        "total_pages": TOTAL_PAGES, "kv_page_size": PAGE, "max_forward_tokens": MOST_TOKENS,
        "max_forward_requests": MOST_REQUESTS, "max_page_refs": MOST_PAGE_REFS,
        "max_model_len": POSITIONS, "vocab_size": VOCABULARY, "arch_name": "stand-in",
    });
    let line = json!({"group_id": group, "shmem_name": name, "caps": caps});
    handshake(&format!("{line}\n{{\"ready\":true}}"));
    let mut account = Account::new();
    let mut frames = 0;
    let mut words = Vec::new();
    let mut answer = vec![0; server.layout().response_capacity()];
    while let Some(lease) = server.wait(Wait::Park).unwrap() {
        frames += 1;
        if behaviour == "die-later" && frames > 5 {
            server.unlink();
            process::exit(7);
        }
        if behaviour == "kill-later" && frames > 5 {
            kill_process(getppid().unwrap(), Signal::KILL).unwrap();
        }
        if behaviour == "stuck" {
            thread::sleep(Duration::from_mins(1));
            return;
        }
        let mut response = match account.take(lease.copy_request(&mut words).unwrap()) {
            Ok(response) => response,
            Err(problem) => {
                eprintln!("frame {frames} is wrong: {problem}");
                continue;
            }
        };
        if behaviour == "empties" {
            response.tokens.remove(1);
            response.tokens_indptr = vec![0, 1, 1, 2];
        }
        let fast = behaviour != "archives" && has_fast_reply(&response);
        let length = reply(response, fast, &mut answer);
        let _ = lease.reply(&answer[..length]).unwrap();
    }
}

struct Account {
    planner: Planner,
    /// Context, index and token in each slot.
    slots: HashMap<(u32, u32), (u64, u32, u32)>,
    histories: HashMap<u64, Vec<u32>>,
    /// What each context was given last.
    given: HashMap<u64, u32>,
}

impl Account {
    fn new() -> Self {
        Self {
            planner: Planner::new(LIMITS, 42),
            slots: HashMap::new(),
            histories: HashMap::new(),
            given: HashMap::new(),
        }
    }

    fn take(&mut self, bytes: &[u8]) -> Result<ForwardResponse, String> {
        let frame = pie_wire::access_request(bytes).map_err(|error| error.to_string())?;
        let ArchivedPayload::Forward(archived) = &frame.payload else {
            return Err("not a forward".to_owned());
        };
        let planned = self.planner.plan(0, archived);
        let plan = planned.map_err(|error| error.to_string())?;
        if let Some((request, fault)) = plan.request_errors().first() {
            return Err(format!("request {request}: {fault}"));
        }
        let Payload::Forward(body) = pie_wire::decode_request(bytes).unwrap().payload else {
            return Err("not a forward".to_owned());
        };
        check_frame(&body)?;
        let requests = body.context_ids.len();
        (0..requests).try_for_each(|request| self.store(&body, request))?;
        (0..requests).try_for_each(|request| self.look(&body, request))?;
        Ok(self.answer(&body))
    }

    /// Stores the tokens of a request in its pages.
    fn store(&mut self, body: &ForwardRequest, request: usize) -> Result<(), String> {
        let rows = range(&body.qo_indptr, request);
        let (id, tokens) = (body.context_ids[request], &body.token_ids[rows.clone()]);
        let Some(&start) = body.position_ids[rows.clone()].first() else {
            return Ok(());
        };
        let history = self.histories.entry(id).or_default();
        if start == 0 {
            history.clear();
        } else if self.given.get(&id) != tokens.first() {
            return Err(format!(
                "context {id} goes on with another token than it was given"
            ));
        }
        let pages = &body.kv_page_indices[range(&body.kv_page_indptr, request)];
        let drafts = range(&body.spec_indptr, request);
        let count = drafts.len() as u32;
        // The page list covers the drafts, the last page's length does not.
        let full = (body.kv_last_page_lens[request] + count + PAGE - 1) % PAGE + 1;
        let end = (pages.len() as u32 - 1) * PAGE + full - count;
        if history.len() != start as usize || end != start + tokens.len() as u32 {
            return Err(format!(
                "context {id} has {} tokens, not {start}",
                history.len()
            ));
        }
        for (&token, &position) in tokens.iter().zip(&body.position_ids[rows]) {
            let index = history.len() as u32;
            if position != index {
                return Err(format!("position {position} is stored at {index}"));
            }
            let slot = (pages[(index / PAGE) as usize], index % PAGE);
            self.slots.insert(slot, (id, index, token));
            history.push(token);
        }
        for (index, place) in (history.len() as u32..).zip(drafts) {
            if body.spec_position_ids[place] != index {
                return Err(format!("a draft of context {id} is not at {index}"));
            }
            let slot = (pages[(index / PAGE) as usize], index % PAGE);
            self.slots
                .insert(slot, (id, index, body.spec_token_ids[place]));
        }
        Ok(())
    }

    /// Checks all that a request sees, once all tokens are stored.
    fn look(&self, body: &ForwardRequest, request: usize) -> Result<(), String> {
        let id = body.context_ids[request];
        if range(&body.qo_indptr, request).is_empty() {
            return Ok(());
        }
        let pages = &body.kv_page_indices[range(&body.kv_page_indptr, request)];
        for (index, &token) in (0..).zip(&self.histories[&id]) {
            let slot = (pages[(index / PAGE) as usize], index % PAGE);
            if self.slots.get(&slot) != Some(&(id, index, token)) {
                return Err(format!(
                    "context {id} finds {:?} in slot {slot:?}",
                    self.slots.get(&slot)
                ));
            }
        }
        Ok(())
    }

    fn answer(&mut self, body: &ForwardRequest) -> ForwardResponse {
        let mut response = ForwardResponse {
            num_requests: body.context_ids.len() as u32,
            tokens_indptr: vec![0],
            spec_indptr: vec![0],
            probe_plan_us: 17,
            ..ForwardResponse::default()
        };
        for (request, &id) in body.context_ids.iter().enumerate() {
            if !range(&body.sampler_indptr, request).is_empty() {
                let drafts = &body.spec_token_ids[range(&body.spec_indptr, request)];
                self.verify(id, drafts, &mut response);
                if body.output_spec_flags[request] {
                    self.draft(id, &mut response);
                }
            }
            response.spec_indptr.push(response.spec_tokens.len() as u32);
            response.tokens_indptr.push(response.tokens.len() as u32);
        }
        response
    }
}

impl Account {
    /// Answers with the drafts that are right, which are part of the history from now on, and one more token.
    fn verify(&mut self, id: u64, drafts: &[u32], response: &mut ForwardResponse) {
        let history = self.histories.get_mut(&id).unwrap();
        for &draft in drafts {
            if draft != next(history) {
                break;
            }
            history.push(draft);
            response.tokens.push(draft);
        }
        let token = next(history);
        self.given.insert(id, token);
        response.tokens.push(token);
    }

    /// Up to [`MOST_DRAFTS`], of which a first part is right.
    fn draft(&self, id: u64, response: &mut ForwardResponse) {
        let mut text = self.histories[&id].clone();
        text.push(self.given[&id]);
        let count = (text.len() * 5 + id as usize) % (MOST_DRAFTS + 1);
        let right = text.len() % (MOST_DRAFTS + 1);
        for index in 0..count {
            let token = (next(&text) + u32::from(index >= right)) % VOCABULARY;
            response.spec_positions.push(text.len() as u32);
            response.spec_tokens.push(token);
            text.push(token);
        }
    }
}

/// What follows a text.
fn next(text: &[u32]) -> u32 {
    let mix = |sum: u32, &token: &u32| (sum * 31 + token + 1) % VOCABULARY;
    text.iter().fold(7, mix)
}

/// What the runtime keeps to in every frame.
fn check_frame(body: &ForwardRequest) -> Result<(), String> {
    let counts = [
        body.context_ids.len(),
        body.token_ids.len(),
        body.kv_page_indices.len(),
        body.samplers.len(),
    ];
    eprintln!(
        "frame {} {} {} {} {}",
        counts[0],
        counts[1],
        counts[2],
        counts[3],
        body.spec_token_ids.len()
    );
    let limits = [MOST_REQUESTS, MOST_TOKENS, MOST_PAGE_REFS, MOST_REQUESTS];
    if counts
        .iter()
        .zip(limits)
        .any(|(&count, limit)| count > limit as usize)
    {
        return Err(format!("{counts:?} is above {limits:?}"));
    }
    let single = body.qo_indptr.windows(2).all(|ends| ends[1] - ends[0] <= 1);
    let rows: Vec<&[u32]> = body.masks.iter().map(|row| &row.buffer[..]).collect();
    let causal: Vec<[u32; 2]> = body
        .position_ids
        .iter()
        .map(|position| [0, position + 1])
        .collect();
    let with_masks = !single || !body.spec_token_ids.is_empty();
    let right = if with_masks {
        rows == causal
    } else {
        rows.is_empty()
    };
    if single != body.single_token_mode || !right {
        return Err(format!("single {single}, masks {rows:?}"));
    }
    for (request, &row) in body.sampling_indices.iter().enumerate() {
        // Requests that sample come first, with one sampler each.
        if row as usize + 1 != range(&body.qo_indptr, request).len() {
            return Err(format!("request {request} samples row {row}"));
        }
    }
    Ok(())
}

fn range(indptr: &[u32], request: usize) -> std::ops::Range<usize> {
    indptr[request] as usize..indptr[request + 1] as usize
}

/// As the protocol asks: when every request has one token.
fn has_fast_reply(response: &ForwardResponse) -> bool {
    let mut ends = response.tokens_indptr.windows(2);
    ends.all(|ends| ends[1] == ends[0] + 1) && response.spec_tokens.is_empty()
}

fn reply(response: ForwardResponse, fast: bool, buffer: &mut [u8]) -> usize {
    if fast {
        return pie_wire::encode_fast_tokens(0, &response.tokens, buffer).unwrap();
    }
    let frame = ResponseFrame {
        driver_id: 0,
        aborted: false,
        payload: ResponsePayload::Forward(response),
    };
    pie_wire::encode_response(&frame, buffer).unwrap()
}
