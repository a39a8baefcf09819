//! What is checked of each step and output.

use std::collections::HashSet;

use pie_scheduler::{Finish, Output};

use super::driver::Frame;
use super::{Ended, Sim};

impl Sim {
    /// The driver keeps no more parameters of requests that have not ended than it may, or those of one.
    pub(super) fn check_params(&mut self) {
        let open: HashSet<u64> = self.expected.keys().map(|key| key.0).collect();
        let kept = open.intersection(&self.driver.registered);
        let sizes: Vec<u64> = kept
            .map(|id| self.words[id].1.into())
            .filter(|&it| it > 0)
            .collect();
        let bytes: u64 = sizes.iter().sum();
        assert!(
            sizes.len() < 2 || bytes <= self.limits.frame.params,
            "{sizes:?}"
        );
        self.tally.add("parameters kept", sizes.len() as u64);
    }

    /// A row has an image whole or nothing of it, and a step has no more of them than it may.
    pub(super) fn check_images(&mut self, frames: &[Frame]) {
        let mut brought = Vec::new();
        for frame in frames {
            let request = &self.expected[&(frame.id, frame.sample)].request;
            let (start, end) = (frame.start, frame.start + frame.tokens.len() as u32);
            for image in &request.images {
                let inside = image.start >= start && image.end() <= end;
                assert!(
                    inside || image.end() <= start || image.start >= end,
                    "{image:?} in {frame:?}"
                );
                if inside {
                    brought.push(image.bytes);
                }
            }
        }
        let bytes: u32 = brought.iter().sum();
        assert!(bytes <= self.limits.max_image_bytes, "{brought:?}");
        self.tally.add("images", brought.len() as u64);
    }

    pub(super) fn read_outputs(&mut self) {
        let mut outputs = std::mem::take(&mut self.outputs);
        self.scheduler.outputs(&mut outputs);
        for output in outputs.iter() {
            self.read_output(&output);
        }
        self.outputs = outputs;
    }

    /// Compares the tokens of an output with those that its request was to get.
    fn read_output(&mut self, output: &Output<'_>) {
        let key = (output.id, output.sample);
        let expected = self.expected.get_mut(&key);
        let expected = expected.unwrap_or_else(|| panic!("{output:?} after its end"));
        let (words, _) = self.words[&key.0];
        let mut logprobs = Vec::new();
        for &token in output.tokens {
            logprobs.extend(expected.mind.score(token, words));
            expected.say(token, key.1, &self.text);
        }
        let scored = expected.only_scores() && output.finish == Some(Finish::Length);
        if scored {
            let token = expected.mind.next(key.1, expected.forbidden());
            logprobs.extend(expected.mind.score(token, words));
            self.tally.add("prompts that are only scored", 1);
        }
        assert_eq!(output.logprobs, logprobs, "of {expected:?}");
        expected.hear_prompt(output.prompt_logprobs);
        let all = scored || !output.tokens.is_empty();
        assert!(!all || expected.prompt_logprobs.is_empty(), "{expected:?}");
        assert!(output.loaded_tokens <= output.cached_tokens, "{output:?}");
        assert!(
            output.tokens.is_empty() || output.admitted.is_some(),
            "{output:?}"
        );
        if !output.tokens.is_empty() {
            let first = output.first_token;
            assert!(
                output.admitted <= first && first <= Some(self.now),
                "{output:?}"
            );
        }
        self.read_end(output);
    }

    /// Compares the end of an output, or that it has none.
    fn read_end(&mut self, output: &Output<'_>) {
        assert!(output.weight_version <= self.weight_version);
        let key = (output.id, output.sample);
        let expected = self.expected.get_mut(&key).expect("it has not ended");
        if let Some(finish) = output.finish {
            self.tally.add(name(finish), 1);
            self.tally.add("retractions", output.retractions.into());
            self.tally.add("cached tokens", output.cached_tokens.into());
            if finish == Finish::Deadline {
                let limit = self.running_limit_us;
                let ran = output.admitted.map(|at| at + limit).filter(|_| limit > 0);
                let waited = expected
                    .request
                    .admit_by
                    .filter(|_| output.admitted.is_none());
                let due = [expected.request.deadline, ran, waited];
                let due = due.into_iter().flatten().min();
                assert!(due.is_some_and(|due| due <= self.now), "{output:?}");
            }
            expected.end(finish);
            if expected.request.streams {
                assert_eq!(output.weight_events, expected.weight_events, "{output:?}");
            }
            let changes = output.weight_events.len() as u64;
            self.tally.add("changes of the weights", changes);
            self.expected.remove(&key);
            self.ended.push(Ended {
                id: key.0,
                sample: key.1,
                finish,
                cached_tokens: output.cached_tokens,
                retractions: output.retractions,
            });
        } else {
            assert!(!output.tokens.is_empty() && expected.request.streams);
            assert!(!expected.has_ended(), "it should have ended: {expected:?}");
            expected.check_held(output.held_bytes);
        }
    }
}

fn name(finish: Finish) -> &'static str {
    match finish {
        Finish::Length => "ended by length",
        Finish::StopToken(_) => "ended by a token",
        Finish::StopString { .. } => "ended by text",
        Finish::StopRegex { .. } => "ended by an expression",
        Finish::Aborted | Finish::Unready => "aborted",
        Finish::Deadline => "late",
        Finish::Displaced => "displaced",
        Finish::Grammar | Finish::Processor | Finish::Busy => "ended by its constraint",
        Finish::Failed => "failed",
    }
}
