//! A serving engine in one file, without a GPU: prompts go in, steps are computed over pages of KV, text comes out.
//!
//! The scheduler owns the page pool (`pie_kv_cache::pages`) and the prefix index (`pie_kv_cache::radix`). What an engine adds is here: a device
//! with its KV, and the loop between both. Tokens are bytes. The model is an induction head: it continues a text as it went
//! on at the index that reads most like its end, and knows the text by KV alone. So a wrong page is a wrong answer.
//!
//! ```text
//! cargo run -p pie-scheduler --example engine
//! ```

use std::error::Error;
use std::io::{Write, stdout};

use pie_scheduler::{Config, FrameBytes, Limits, NewRequest, Outputs, Row, Scheduler, StepOutput};

const PAGE_SIZE: usize = 16;

const LIMITS: Limits = Limits {
    total_pages: 16,
    host_pages: 0,
    page_size: PAGE_SIZE as u32,
    max_forward_tokens: 64,
    max_forward_requests: 8,
    max_page_refs: 128,
    max_image_bytes: 0,
    max_model_len: 128,
    vocab_size: 256,
    max_logprob_words: 1024,
    frame: FrameBytes::UNLIMITED,
};

/// Pages of KV. The KV of a token is the token.
struct Device(Vec<[u32; PAGE_SIZE]>);

impl Device {
    /// Stores the KV of a row's tokens. Returns the next token, if the row samples one.
    fn forward(&mut self, row: &Row<'_, ()>) -> Option<u32> {
        let start = row.start as usize;
        for (at, &token) in (start..).zip(row.tokens) {
            self.0[row.pages[at / PAGE_SIZE] as usize][at % PAGE_SIZE] = token;
        }
        // What comes before the row is in its pages, whichever request computed it.
        let pages = row.pages.iter().flat_map(|&page| self.0[page as usize]);
        let text: Vec<u32> = pages.take(start + row.tokens.len()).collect();
        let alike = |at: &usize| {
            let pairs = text[..*at].iter().rev().zip(text.iter().rev());
            pairs.take_while(|(one, other)| one == other).count()
        };
        let at = (1..text.len()).max_by_key(alike);
        row.sampling.and(at).map(|at| text[at])
    }
}

/// Serves prompts until all have ended, and writes what each was answered, and where its pages came from.
///
/// # Errors
///
/// A prompt is refused, or the output cannot be written. The scheduler's own errors are mistakes in this file.
pub(crate) fn serve(prompts: &[String], out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    let mut device = Device(vec![[0; PAGE_SIZE]; LIMITS.total_pages as usize]);
    let mut scheduler = Scheduler::new(Config::default(), LIMITS, None)?;
    for (id, prompt) in (0..).zip(prompts) {
        // What rides along with a request, here `()`, would be the parameters of its sampler.
        let mut request = NewRequest::new(id, prompt.bytes().map(u32::from).collect(), (), 32);
        request.stop.stop_tokens = vec![b'.'.into()];
        scheduler.submit(request)?;
    }
    let (mut now, mut outputs) = (0, Outputs::default());
    let mut answers = vec![String::new(); prompts.len()];
    while let Some(step) = scheduler.schedule(now)? {
        // A GPU computes a step while the next one is laid out: "One step ahead" in the crate's documentation.
        let (mut tokens, mut token_ends) = (Vec::new(), vec![0]);
        for row in step.rows() {
            tokens.extend(device.forward(&row));
            token_ends.push(tokens.len() as u32);
        }
        // In µs of any clock: steps of this device take a millisecond.
        now += 1000;
        let answer = StepOutput {
            tokens: &tokens,
            token_ends: &token_ends,
            ..StepOutput::default()
        };
        scheduler.process_output(now, &answer)?;
        scheduler.outputs(&mut outputs);
        for output in outputs.iter() {
            let id = output.id as usize;
            // A server would send these to its client.
            answers[id].extend(output.tokens.iter().map(|&token| token as u8 as char));
            if output.finish.is_some() {
                let (stats, cached) = (scheduler.stats(), output.cached_tokens);
                writeln!(
                    out,
                    "request {id}: {:?}; {cached} of {} prompt tokens cached; {} pages free, {} cached",
                    answers[id],
                    prompts[id].len(),
                    stats.free_pages,
                    stats.cached_pages
                )?;
            }
        }
    }
    // Every page has as many holders as it counts, and those that the prefix index kept are free again.
    scheduler.check_invariants()?;
    scheduler.flush();
    writeln!(out, "{} pages free", scheduler.stats().free_pages)?;
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let sentences = "The cat sat on the mat. The dog lay on the rug. ";
    let prompts = ["The cat", "The dog", "The"].map(|start| format!("{sentences}{start}"));
    serve(&prompts, &mut stdout().lock())
}
