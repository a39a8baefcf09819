//! A driver without a model. It keeps account of every KV slot: a request must find its own positions in its pages, and its
//! next token follows from all the tokens there.

#[path = "behaviour.rs"]
mod behaviour;

use std::collections::{HashMap, HashSet};
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{self, Command};
use std::thread;
use std::time::Duration;

use pie_ring::{ExitGuard, RegionLayout, Server, ServerConfig, Wait};
use pie_wire::{
    CopyDirection, CopyRequest, Extension, ForwardRequest, ForwardResponse, Frame, LogprobOptions,
    LogprobRows, LogprobShape, ParamsRef, Payload, RequestExtension, ResponseFrame,
    ResponsePayload,
};
use serde_json::json;

use behaviour::{Behaviour, Shrink};

pub(crate) const PAGE: u32 = 4;
pub(crate) const TOTAL_PAGES: u32 = 48;
pub(crate) const POSITIONS: u32 = 128;
pub(crate) const VOCABULARY: u32 = 97;
const HOST_PAGES: u32 = 12;
const MOST_REQUESTS: u32 = 8;
const MOST_TOKENS: u32 = 64;
const MOST_PAGE_REFS: u32 = 120;

/// What `python` is: it becomes this test program.
pub(crate) fn script(folder: &Path, behaviour: &str) -> PathBuf {
    let path = folder.join("python");
    let this = std::env::current_exe().unwrap();
    let text = format!(
        "#!/bin/sh\n\
         [ \"$#:$1:$2:$3:$5:$6\" = 6:-m:pie_driver_sglang:--config:--handshake-fd:3 ] || exit 64\n\
         PIE_TEST_BEHAVIOUR='{behaviour}' PIE_TEST_STARTS='{}' PIE_TEST_CONFIG=\"$4\" \\\n\
         exec '{}' --exact stand_in --nocapture\n",
        folder.join("starts").display(),
        this.display()
    );
    let source = folder.join("script");
    fs::write(&source, text).unwrap();
    // Written by another process: a file that a fork of this one still has open for writing cannot be run.
    let installed = Command::new("install")
        .args(["-m", "755"])
        .args([&source, &path])
        .status();
    assert!(installed.unwrap().success());
    path
}

/// What follows a text.
pub(crate) fn next(text: &[u32]) -> u32 {
    next_by(-1, text)
}

/// What follows a text by an adapter; -1 for none.
pub(crate) fn next_by(adapter: i64, text: &[u32]) -> u32 {
    let mix = |sum: u32, &token: &u32| (sum * 31 + token + 1) % VOCABULARY;
    text.iter().fold((8 + adapter) as u32, mix)
}

/// The words of a token's log-probabilities after a text: its own, those of as many most probable ones with their ids, and those
/// of given tokens.
pub(crate) fn position_words(text: &[u32], token: u32, top: u32, given: &[u32]) -> Vec<u32> {
    let word = |token: u32| next(text) * 1000 + token;
    let ids = (0..top).map(|rank| (next(text) + rank) % VOCABULARY);
    let others = given.iter().map(|&token| word(token));
    let values = ids.clone().map(word).chain(others);
    [word(token)].into_iter().chain(ids).chain(values).collect()
}

/// Serves until it is stopped, or fails as the test asks.
pub(crate) fn main(config: &str) {
    let mut behaviour = Behaviour::parse(&std::env::var("PIE_TEST_BEHAVIOUR").unwrap());
    let starts = std::env::var("PIE_TEST_STARTS").unwrap();
    let start = fs::read_to_string(&starts).map_or(0, |text| text.lines().count() as u32) + 1;
    let mut file = OpenOptions::new()
        .create(true)
        .append(true)
        .open(&starts)
        .unwrap();
    writeln!(file, "{}", process::id()).unwrap();
    let ready = Path::new(&starts).with_file_name("ready");
    while behaviour.waits && start > 1 && !ready.exists() {
        thread::sleep(Duration::from_millis(5));
    }
    if behaviour.die_early_from.is_some_and(|from| start >= from) {
        eprintln!("no GPU here");
        process::exit(9);
    }
    let config: toml::Table = fs::read_to_string(config).unwrap().parse().unwrap();
    let driver = &config["driver"];
    let kept = driver.get("kept_pages").and_then(toml::Value::as_integer);
    if behaviour.shrink == Shrink::Untold && kept == Some(TOTAL_PAGES.into()) {
        behaviour.shrink = Shrink::Never;
    }
    serve(driver["group_id"].as_integer().unwrap(), behaviour, start);
}

fn handshake(lines: &str) {
    let pipe = OpenOptions::new().write(true).open("/proc/self/fd/3");
    writeln!(pipe.unwrap(), "{lines}").unwrap();
}

fn serve(group: i64, behaviour: Behaviour, start: u32) {
    let guard = ExitGuard::install().unwrap();
    let name = format!("/pie_shmem_g{group}");
    let abort = pie_wire::abort_frame(0);
    let mut ring = ServerConfig::new(&name, pie_wire::SCHEMA_HASH, abort.to_vec());
    let request = behaviour.slot_bytes.unwrap_or(1 << 16);
    ring.layout = RegionLayout::new(2, request, 1 << 16).unwrap();
    let mut server = Server::create(&ring, &guard).unwrap();
    let shrunk = u32::from(behaviour.shrink != Shrink::Never && start > 1);
    let caps = json!({
        "total_pages": TOTAL_PAGES - shrunk, "kv_page_size": PAGE, "swap_pool_size": HOST_PAGES,
        "max_forward_tokens": MOST_TOKENS, "max_forward_requests": MOST_REQUESTS,
        "max_page_refs": MOST_PAGE_REFS, "max_model_len": POSITIONS, "vocab_size": VOCABULARY,
        "arch_name": "stand-in",
    });
    let line = json!({"group_id": group, "shmem_name": name, "caps": caps});
    eprintln!("ready, start {start}");
    handshake(&format!("{line}\n{{\"ready\":true}}"));
    let mut account = Account::default();
    let mut frames = 0;
    let mut words = Vec::new();
    let mut answer = vec![0; server.layout().response_capacity()];
    let first = start == 1;
    while let Some(lease) = server.wait(Wait::Park).unwrap() {
        let bytes = lease.copy_request(&mut words).unwrap();
        let (archive, extension) = pie_wire::split_request(bytes).unwrap();
        let frame: Frame = pie_wire::decode_request(archive).unwrap();
        thread::sleep(Duration::from_millis(behaviour.slow));
        let length = match frame.payload {
            Payload::Copy(copy) => {
                account.copy(&copy);
                status(0, &mut answer)
            }
            Payload::Forward(body) => {
                frames += 1;
                let here = |at: Option<u32>| at == Some(frames);
                let has = |token: Option<u32>| token.is_some_and(|token| account.has(&body, token));
                let dies = here(behaviour.die_at) && (first || behaviour.die_always);
                if dies || has(behaviour.die_of) {
                    eprintln!("the device is lost");
                    // As a process that is killed: its reaper removes the region.
                    process::abort();
                }
                if here(behaviour.stuck_at) && first {
                    thread::sleep(Duration::from_mins(1));
                }
                if here(behaviour.refuse_at) && first || has(behaviour.refuse) {
                    eprintln!("this frame is not for me");
                    status(3, &mut answer)
                } else {
                    let taken = account.take(&body, &extension, behaviour.empty);
                    let (response, scores) = taken.unwrap_or_else(|problem| {
                        eprintln!("frame {frames} is wrong: {problem}");
                        process::exit(70);
                    });
                    let length = reply(response, &mut answer);
                    scores.append(&mut answer, length).unwrap()
                }
            }
            Payload::Adapter(load) => {
                let code = if load.path.contains("broken") { 5 } else { 0 };
                if code == 0 {
                    account.adapters.insert(load.adapter_id as i64);
                }
                eprintln!("adapter {} of {}: {code}", load.adapter_id, load.path);
                let length = status(code, &mut answer);
                let reason = if code == 0 {
                    ""
                } else {
                    "it is broken\n\nhint: mend it"
                };
                let reasoned = pie_wire::with_reason(&answer[..length], reason);
                answer[..reasoned.len()].copy_from_slice(&reasoned);
                reasoned.len()
            }
            Payload::Health => status(2, &mut answer),
        };
        let _ = lease.reply(&answer[..length]).unwrap();
    }
}

#[derive(Default)]
struct Account {
    /// Index, token and adapter in each slot.
    slots: HashMap<(u32, u32), (u32, u32, i64)>,
    host: HashMap<(u32, u32), (u32, u32, i64)>,
    /// Loaded ones.
    adapters: HashSet<i64>,
    /// What contexts asked for, by their handles.
    params: HashMap<u32, RequestExtension>,
}

impl Account {
    fn copy(&mut self, request: &CopyRequest) {
        for (&from, &to) in request.srcs.iter().zip(&request.dsts) {
            for offset in 0..PAGE {
                let (found, target) = match request.dir {
                    CopyDirection::D2H => (self.slots.get(&(from, offset)), &mut self.host),
                    CopyDirection::H2D => (self.host.get(&(from, offset)), &mut self.slots),
                    CopyDirection::D2D | CopyDirection::H2H => panic!("no such copy is asked for"),
                };
                match found.copied() {
                    Some(slot) => target.insert((to, offset), slot),
                    None => target.remove(&(to, offset)),
                };
            }
        }
    }

    /// Whether a request of a frame has a text that begins with this token.
    fn has(&self, body: &ForwardRequest, token: u32) -> bool {
        (0..body.context_ids.len()).any(|request| {
            let row = body.qo_indptr[request] as usize;
            let begins = body.position_ids.get(row) == Some(&0);
            let stored = self.slots.get(&(pages(body, request)[0], 0));
            let first = if begins {
                Some(body.token_ids[row])
            } else {
                stored.map(|&(_, token, _)| token)
            };
            first == Some(token)
        })
    }

    fn take(
        &mut self,
        body: &ForwardRequest,
        extension: &Extension<'_>,
        empty: Option<u32>,
    ) -> Result<(ForwardResponse, LogprobRows), String> {
        check_limits(body)?;
        let requests = body.context_ids.len();
        (0..requests).for_each(|request| self.store(body, request));
        let mut response = ForwardResponse {
            num_requests: requests as u32,
            tokens_indptr: vec![0],
            spec_indptr: vec![0],
            ..ForwardResponse::default()
        };
        let mut scores = LogprobRows::default();
        let params: Vec<_> = extension
            .params()
            .map(|it| (it.handle(), it.to_owned()))
            .collect();
        for (handle, asked) in &params {
            self.params
                .extend(handle.map(|handle| (handle, asked.clone())));
        }
        let mut rows = extension.rows();
        for request in 0..requests {
            let mut text = self.look(body, request)?;
            let before = response.tokens.len();
            let adapter = body.adapter_bindings[request].adapter_id;
            let lost = adapter >= 0 && !self.adapters.contains(&adapter);
            let rejected = lost || empty.is_some() && text.first().copied() == empty;
            let row = rows.of(request);
            if !range(&body.sampler_indptr, request).is_empty() && !rejected {
                let bits = row.map(|row| row.mask.iter().collect()).unwrap_or_default();
                answer(body, request, (text.clone(), bits), &mut response)?;
            }
            let asked = row.map(|row| match row.params() {
                ParamsRef::None => row.to_owned(RequestExtension::default()),
                ParamsRef::InFrame(number) => row.to_owned(params[number as usize].1.clone()),
                ParamsRef::Kept(handle) => row.to_owned(self.params[&handle].clone()),
            });
            if let Some(asked) = asked.and_then(|asked| asked.logprobs)
                && !rejected
            {
                let tokens = &response.tokens[before..];
                score(body, request, &asked, (&mut text, tokens), &mut scores);
            }
            response.spec_indptr.push(response.spec_tokens.len() as u32);
            response.tokens_indptr.push(response.tokens.len() as u32);
        }
        Ok((response, scores))
    }

    /// Stores the tokens of a request in its pages, and its drafts after them.
    fn store(&mut self, body: &ForwardRequest, request: usize) {
        let pages = pages(body, request);
        let rows = range(&body.qo_indptr, request);
        let drafts = range(&body.spec_indptr, request);
        let inputs = body.position_ids[rows.clone()]
            .iter()
            .zip(&body.token_ids[rows]);
        let drafted = body.spec_position_ids[drafts.clone()]
            .iter()
            .zip(&body.spec_token_ids[drafts]);
        let adapter = body.adapter_bindings[request].adapter_id;
        for (&index, &token) in inputs.chain(drafted) {
            let slot = (pages[(index / PAGE) as usize], index % PAGE);
            self.slots.insert(slot, (index, token, adapter));
        }
    }

    /// All that a request sees, once the tokens of all are stored.
    fn look(&self, body: &ForwardRequest, request: usize) -> Result<Vec<u32>, String> {
        let pages = pages(body, request);
        let rows = range(&body.qo_indptr, request);
        let end = body.position_ids[rows.end - 1] + 1;
        if body.kv_last_page_lens[request] != (end - 1) % PAGE + 1 {
            return Err(format!(
                "the last page of request {request} ends elsewhere than at {end}"
            ));
        }
        let adapter = body.adapter_bindings[request].adapter_id;
        let text = (0..end).map(|index| {
            let slot = (pages[(index / PAGE) as usize], index % PAGE);
            match self.slots.get(&slot) {
                Some(&(found, token, by)) if (found, by) == (index, adapter) => Ok(token),
                found => Err(format!(
                    "request {request} finds {found:?} at {index}, in {slot:?}"
                )),
            }
        });
        text.collect()
    }
}

/// Writes the log-probabilities of a request whose text was answered with tokens.
fn score(
    body: &ForwardRequest,
    request: usize,
    asked: &LogprobOptions,
    (text, tokens): (&mut Vec<u32>, &[u32]),
    scores: &mut LogprobRows,
) {
    let rows = range(&body.qo_indptr, request);
    let shape = LogprobShape {
        top: asked.top,
        given: asked.token_ids.len() as u32,
        hidden: 0,
    };
    let words_of = |text: &[u32], token| position_words(text, token, asked.top, &asked.token_ids);
    let mut words = Vec::new();
    let (mut prompt, end) = (0, text.len());
    if let Some(wanted) = asked.prompt {
        let first = body.position_ids[rows.start] + 1;
        for index in wanted.from.max(first)..wanted.end.min(end as u32 + 1) {
            let (before, after) = text.split_at(index as usize);
            words.extend(words_of(
                before,
                after.first().copied().unwrap_or(wanted.next),
            ));
            prompt += 1;
        }
    }
    for &token in tokens {
        words.extend(words_of(text, token));
        text.push(token);
    }
    scores.push(request as u32, shape, (prompt, tokens.len() as u32), words);
}

/// Verifies drafts, draws a token, and drafts what may come next: not all of it is right.
fn answer(
    body: &ForwardRequest,
    request: usize,
    (mut text, bits): (Vec<u32>, Vec<u32>),
    response: &mut ForwardResponse,
) -> Result<(), String> {
    let rows = range(&body.qo_indptr, request);
    let next = |text: &[u32]| next_by(body.adapter_bindings[request].adapter_id, text);
    if body.sampling_indices[range(&body.sampler_indptr, request).start] as usize + 1 != rows.len()
    {
        return Err(format!(
            "request {request} samples another row than its last"
        ));
    }
    for &draft in &body.spec_token_ids[range(&body.spec_indptr, request)] {
        if draft != next(&text) {
            break;
        }
        text.push(draft);
        response.tokens.push(draft);
    }
    let token = allowed(body, request, &bits, next(&text));
    response.tokens.push(token);
    text.push(token);
    if body.output_spec_flags[request] {
        let right = text.len() % 4;
        for index in 0..text.len() % 5 {
            let token = (next(&text) + u32::from(index >= right)) % VOCABULARY;
            response.spec_positions.push(text.len() as u32);
            response.spec_tokens.push(token);
            text.push(token);
        }
    }
    Ok(())
}

/// The token, or the first one after it that the request's mask allows.
fn allowed(body: &ForwardRequest, request: usize, bits: &[u32], token: u32) -> u32 {
    let masks = &body.logit_masks[range(&body.logit_mask_indptr, request)];
    assert!(masks.is_empty() || bits.is_empty());
    let may = |token: &u32| {
        let by_bits = bits.is_empty() || bits[*token as usize / 32] >> (token % 32) & 1 == 1;
        by_bits
            && masks.iter().all(|mask| {
                let mut ranges = pie_wire::brle::true_ranges(&mask.buffer, VOCABULARY.into());
                ranges.any(|range| range.contains(&u64::from(*token)))
            })
    };
    let mut tokens = (token..VOCABULARY).chain(0..token);
    tokens.find(may).unwrap()
}

fn check_limits(body: &ForwardRequest) -> Result<(), String> {
    let counts = [
        body.context_ids.len(),
        body.token_ids.len() + body.spec_token_ids.len(),
        body.kv_page_indices.len(),
    ];
    let limits = [MOST_REQUESTS, MOST_TOKENS, MOST_PAGE_REFS];
    let within = |(&count, limit): (&usize, u32)| count <= limit as usize;
    if !counts.iter().zip(limits).all(within) {
        return Err(format!("{counts:?} is above {limits:?}"));
    }
    if body.kv_page_indices.iter().any(|&page| page >= TOTAL_PAGES) {
        return Err(format!(
            "{:?} has a page that is not there",
            body.kv_page_indices
        ));
    }
    Ok(())
}

fn pages(body: &ForwardRequest, request: usize) -> &[u32] {
    &body.kv_page_indices[range(&body.kv_page_indptr, request)]
}

fn range(indptr: &[u32], request: usize) -> std::ops::Range<usize> {
    indptr[request] as usize..indptr[request + 1] as usize
}

/// Writes an answer without content, and returns its length.
fn status(code: i32, answer: &mut [u8]) -> usize {
    let frame = pie_wire::status_frame(0, code, false);
    answer[..frame.len()].copy_from_slice(&frame);
    frame.len()
}

/// As the protocol asks: the fast reply when every request has one token.
fn reply(response: ForwardResponse, buffer: &mut [u8]) -> usize {
    let mut ends = response.tokens_indptr.windows(2);
    if ends.all(|ends| ends[1] == ends[0] + 1) && response.spec_tokens.is_empty() {
        return pie_wire::encode_fast_tokens(0, &response.tokens, buffer).unwrap();
    }
    let frame = ResponseFrame {
        driver_id: 0,
        aborted: false,
        payload: ResponsePayload::Forward(response),
    };
    pie_wire::encode_response(&frame, buffer).unwrap()
}
