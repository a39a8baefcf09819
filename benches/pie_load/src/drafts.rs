//! The same prompts decoded without and with the driver's drafts, in turns on one driver.

use std::time::Instant;

use pie_engine::{Capabilities, Link};
use serde::Serialize;

use crate::args::DraftsArgs;
use crate::context::Context;
use crate::error::LoadError;
use crate::pages::PagePool;
use crate::prompts::Prompts;
use crate::steps::{Samples, prefill, skip_reason};
use crate::summary::{Summary, median};

/// One batch size.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) batch: u32,
    /// Why there are no figures.
    pub(crate) skipped: Option<String>,
    #[serde(flatten)]
    pub(crate) figures: Option<Figures>,
    pub(crate) repeats: Vec<Pair>,
}

/// Medians over the repeats.
#[derive(Debug, Serialize)]
pub(crate) struct Figures {
    pub(crate) without: Side,
    pub(crate) with: Side,
    /// Tokens per second with drafts, by those without.
    pub(crate) ratio: f64,
    /// The same of the repeats all of whose prompts the driver had not been given before.
    pub(crate) ratio_of_new: Option<f64>,
    pub(crate) drafted: u64,
    pub(crate) accepted: u64,
    /// By steps and contexts.
    pub(crate) accepted_per_step: f64,
    pub(crate) agreement: Option<Agreement>,
}

/// Medians of the plays without drafts, or of those with them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Side {
    pub(crate) tokens_per_s: f64,
    pub(crate) steps: f64,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
}

/// Prompts that were played both with and without drafts.
#[derive(Debug, Serialize)]
pub(crate) struct Pair {
    /// How many of the prompts were played before, so that a shared history may know their texts.
    pub(crate) again: usize,
    pub(crate) without: Play,
    pub(crate) with: Play,
    pub(crate) ratio: f64,
    /// `None` when tokens are drawn.
    pub(crate) agreement: Option<Agreement>,
}

/// How far the texts of two plays are the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Agreement {
    pub(crate) contexts: usize,
    pub(crate) differ: usize,
    /// Share of the tokens before the first difference.
    pub(crate) equal: f64,
}

/// The decode of one batch, from the first token of each context to the last one of all.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Play {
    pub(crate) tokens: u64,
    pub(crate) seconds: f64,
    pub(crate) tokens_per_s: f64,
    pub(crate) steps: usize,
    /// Requests of all frames.
    pub(crate) requests: u64,
    pub(crate) drafted: u64,
    pub(crate) accepted: u64,
    pub(crate) round_trip_us: Summary,
    #[serde(skip)]
    pub(crate) samples: Samples,
    #[serde(skip)]
    texts: Vec<Vec<u32>>,
}

/// Plays every batch size; `done` takes each row, so that a failure loses no earlier one.
pub(crate) fn play(
    link: &mut Link<'_>,
    caps: &Capabilities,
    args: &DraftsArgs,
    mut done: impl FnMut(Row) -> Result<(), LoadError>,
) -> Result<(), LoadError> {
    let path = args.prompts.as_deref();
    let mut prompts = Prompts::new(path, args.draft_prompt, caps.vocab_size)?;
    let mut player = Player {
        link,
        caps,
        args,
        pool: PagePool::new(caps.total_pages),
        contexts: 0,
    };
    for &batch in &args.draft_batch {
        let prompt = prompts.longest();
        let skipped = skip_reason(caps, batch, prompt, prompt + args.draft_output);
        let count = if skipped.is_some() {
            0
        } else {
            args.draft_repeats
        };
        let pairs = (0..count).map(|repeat| player.pair(&mut prompts, batch, repeat));
        let repeats = pairs.collect::<Result<Vec<Pair>, _>>()?;
        done(Row {
            batch,
            skipped,
            figures: (!repeats.is_empty()).then(|| figures(&repeats)),
            repeats,
        })?;
    }
    Ok(())
}

struct Player<'a, 'c> {
    link: &'a mut Link<'c>,
    caps: &'a Capabilities,
    args: &'a DraftsArgs,
    pool: PagePool,
    /// Contexts so far: none has the id of another.
    contexts: u64,
}

impl Player<'_, '_> {
    /// Plays the next prompts both with and without drafts; which comes first changes with every repeat.
    fn pair(&mut self, prompts: &mut Prompts, batch: u32, repeat: u32) -> Result<Pair, LoadError> {
        let (prompts, again) = prompts.take(batch as usize);
        let drafts_first = repeat % 2 == 1;
        let first = self.play(&prompts, drafts_first)?;
        let second = self.play(&prompts, !drafts_first)?;
        let (without, with) = if drafts_first {
            (second, first)
        } else {
            (first, second)
        };
        let greedy = self.args.draft_sampler.is_greedy();
        Ok(Pair {
            again,
            ratio: with.tokens_per_s / without.tokens_per_s,
            agreement: greedy.then(|| agreement(&without.texts, &with.texts)),
            without,
            with,
        })
    }

    fn play(&mut self, prompts: &[Vec<u32>], drafts: bool) -> Result<Play, LoadError> {
        let mut contexts: Vec<Context> = (0..)
            .zip(prompts)
            .map(|(index, prompt)| self.context(index, prompt.clone(), drafts))
            .collect();
        prefill(self.link, self.caps, &mut self.pool, &mut contexts)?;
        let mut play = Play {
            texts: contexts
                .iter()
                .map(|context| context.turn().tokens.to_vec())
                .collect(),
            ..Play::default()
        };
        self.link.end_series();
        let started = Instant::now();
        while contexts.iter().any(|context| context.remaining > 0) {
            self.step(&mut contexts, &mut play)?;
        }
        play.finish(started.elapsed().as_secs_f64());
        for mut context in contexts {
            context.release(&mut self.pool);
        }
        Ok(play)
    }

    fn context(&mut self, index: usize, prompt: Vec<u32>, drafts: bool) -> Context {
        self.contexts += 1;
        let sampler = self.args.draft_sampler.of(index);
        let context = Context::new(self.contexts, prompt, sampler, self.args.draft_output);
        if drafts { context.drafting() } else { context }
    }

    /// A pass of every context that is not done.
    fn step(&mut self, contexts: &mut [Context], play: &mut Play) -> Result<(), LoadError> {
        let unfinished = |context: &Context| context.remaining > 0;
        for context in contexts.iter_mut().filter(|context| unfinished(context)) {
            context.reserve(&mut self.pool, self.caps.kv_page_size)?;
        }
        // An answer may bring several tokens, so nothing is prepared; nor is it without drafts, to compare like with like.
        let running = contexts.iter().filter(|context| unfinished(context));
        let exchange = self.link.forward(running.map(Context::turn))?;
        let answer = self.link.reply();
        play.samples.push(&exchange);
        let running = contexts.iter_mut().zip(&mut play.texts);
        let running = running.filter(|(context, _)| unfinished(context));
        for (request, (context, text)) in running.enumerate() {
            let tokens = answer.tokens_of(request);
            play.requests += 1;
            play.drafted += context.drafted() as u64;
            play.accepted += tokens.len() as u64 - 1;
            play.tokens += tokens.len() as u64;
            text.extend(tokens);
            context.take(tokens, answer.drafts_of(request));
        }
        Ok(())
    }
}

impl Play {
    fn finish(&mut self, seconds: f64) {
        self.seconds = seconds;
        self.tokens_per_s = self.tokens as f64 / seconds;
        self.steps = self.samples.round_trip_ns.len();
        self.round_trip_us = Summary::of(&self.samples.round_trip_ns);
    }
}

fn agreement(without: &[Vec<u32>], with: &[Vec<u32>]) -> Agreement {
    let pairs = || without.iter().zip(with);
    let equal =
        |(a, b): (&Vec<u32>, &Vec<u32>)| a.iter().zip(b).take_while(|(a, b)| a == b).count();
    let all: usize = without.iter().map(Vec::len).sum();
    Agreement {
        contexts: without.len(),
        differ: pairs().filter(|(a, b)| a != b).count(),
        equal: pairs().map(equal).sum::<usize>() as f64 / all as f64,
    }
}

fn figures(repeats: &[Pair]) -> Figures {
    let with = || repeats.iter().map(|pair| &pair.with);
    let accepted = with().map(|play| play.accepted).sum();
    let requests: u64 = with().map(|play| play.requests).sum();
    let new = repeats.iter().filter(|pair| pair.again == 0);
    Figures {
        without: side(repeats, |pair| &pair.without),
        with: side(repeats, |pair| &pair.with),
        ratio: median(repeats.iter().map(|pair| pair.ratio)).unwrap_or_default(),
        ratio_of_new: median(new.map(|pair| pair.ratio)),
        drafted: with().map(|play| play.drafted).sum(),
        accepted,
        accepted_per_step: accepted as f64 / requests.max(1) as f64,
        agreement: total_agreement(repeats),
    }
}

fn side(repeats: &[Pair], play: fn(&Pair) -> &Play) -> Side {
    let of = |figure: fn(&Play) -> f64| {
        median(repeats.iter().map(|pair| figure(play(pair)))).unwrap_or_default()
    };
    Side {
        tokens_per_s: of(|play| play.tokens_per_s),
        steps: of(|play| play.steps as f64),
        p50_us: of(|play| play.round_trip_us.p50),
        p99_us: of(|play| play.round_trip_us.p99),
    }
}

/// All repeats together; each has as many tokens as the others.
fn total_agreement(repeats: &[Pair]) -> Option<Agreement> {
    let all: Option<Vec<Agreement>> = repeats.iter().map(|pair| pair.agreement).collect();
    let all = all?;
    Some(Agreement {
        contexts: all.iter().map(|one| one.contexts).sum(),
        differ: all.iter().map(|one| one.differ).sum(),
        equal: all.iter().map(|one| one.equal).sum::<f64>() / all.len() as f64,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_agree_up_to_the_first_difference() {
        let without = [vec![1, 2, 3, 4], vec![5, 6, 7, 8]];
        let with = [vec![1, 2, 9, 4], vec![5, 6, 7, 8]];
        let expected = Agreement {
            contexts: 2,
            differ: 1,
            equal: 0.75,
        };
        assert_eq!(agreement(&without, &with), expected);
    }

    fn pair(again: usize, ratio: f64, accepted: u64) -> Pair {
        let play = |tokens_per_s| Play {
            tokens_per_s,
            requests: 8,
            drafted: 10,
            accepted,
            ..Play::default()
        };
        Pair {
            again,
            without: play(100.0),
            with: play(100.0 * ratio),
            ratio,
            agreement: None,
        }
    }

    #[test]
    fn repeats_with_known_prompts_are_told_from_new_ones() {
        let found = figures(&[pair(0, 1.5, 4), pair(1, 4.0, 8), pair(2, 3.0, 0)]);
        assert_eq!((found.ratio, found.ratio_of_new), (3.0, Some(1.5)));
        assert_eq!(
            (found.drafted, found.accepted, found.accepted_per_step),
            (30, 12, 0.5)
        );
        assert_eq!(
            (found.without.tokens_per_s, found.with.tokens_per_s),
            (100.0, 300.0)
        );
        assert_eq!(figures(&[pair(1, 2.0, 1)]).ratio_of_new, None);
    }
}
