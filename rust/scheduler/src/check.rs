//! Whether a request can be served at all.

use crate::config::RowExtras;
use crate::error::Refusal;
use crate::new_request::{Image, NewRequest, StopCriteria};
use crate::scheduler::Scheduler;

/// Most sequences of one request, whatever its caller allows.
pub const MAX_SAMPLES: u32 = 1 << 16;

impl<S> Scheduler<S> {
    /// Whether a request can be served at all. Returns how many tokens it may produce at most.
    pub(crate) fn check(&self, arrival: &NewRequest<S>) -> Result<u32, Refusal> {
        let (id, prompt, ends) = (arrival.id, &arrival.prompt, &arrival.ends);
        if self.requests.contains_key(&id) {
            return Err(Refusal::Known { id });
        }
        if prompt.is_empty() {
            return Err(Refusal::Empty);
        }
        self.check_images(arrival)?;
        self.check_tokens(arrival)?;
        if !(1..=MAX_SAMPLES).contains(&arrival.samples) {
            return Err(Refusal::Samples {
                samples: arrival.samples,
                limit: MAX_SAMPLES,
            });
        }
        let (min, max) = (ends.min_tokens, ends.max_tokens);
        if min > max {
            return Err(Refusal::MinTokens { min, max });
        }
        self.check_texts(ends)?;
        let limit = self.limits.max_logprob_words;
        match arrival.logprobs.map(|wanted| wanted.words) {
            Some(words) if words > limit => return Err(Refusal::Logprobs { words, limit }),
            _ => {}
        }
        let (limit, reason) = self.limits.longest();
        if prompt.len() > limit as usize {
            let tokens = prompt.len();
            return Err(Refusal::TooLong {
                tokens,
                limit,
                reason,
            });
        }
        self.check_row(arrival, limit)?;
        // The last token is given out and not stored.
        Ok(limit - prompt.len() as u32 + 1)
    }

    /// Whether a frame has room for one token of it, however long it becomes.
    fn check_row(&self, arrival: &NewRequest<S>, longest: u32) -> Result<(), Refusal> {
        let (ends, frame) = (&arrival.ends, &self.limits.frame);
        let most = arrival.prompt.len() as u32;
        let most = most.saturating_add(ends.max_tokens).min(longest);
        let more = RowExtras {
            own: arrival.params_bytes,
            listed: most - arrival.prompt.len() as u32,
            forbidden: if ends.min_tokens > 0 {
                ends.stop_tokens.len() as u32
            } else {
                0
            },
            masked: arrival.constraint.is_some(),
        };
        // An image is in one row.
        let images = arrival.images.iter().map(|image| image.tokens);
        let tokens = images.max().unwrap_or(1);
        let bytes = frame.of_row((tokens, 0, most.div_ceil(self.limits.page_size)), more);
        if bytes > frame.max.into() {
            let limit = frame.max;
            return Err(Refusal::RowBytes { bytes, limit });
        }
        Ok(())
    }

    fn check_tokens(&self, arrival: &NewRequest<S>) -> Result<(), Refusal> {
        let vocab = self.limits.vocab_size;
        let mut from = 0;
        let ends = arrival
            .images
            .iter()
            .map(|image| (image.start as usize, image.end() as usize));
        for (start, next) in ends.chain([(arrival.prompt.len(), 0)]) {
            let text = &arrival.prompt[from..start];
            if let Some(place) = text.iter().position(|&token| token >= vocab) {
                let (token, at) = (text[place], from + place);
                return Err(Refusal::Token { token, at, vocab });
            }
            from = next;
        }
        Ok(())
    }

    fn check_images(&self, arrival: &NewRequest<S>) -> Result<(), Refusal> {
        let (most_tokens, most_bytes) = (self.limits.image_tokens(), self.limits.max_image_bytes);
        let mut free = 0;
        for (index, &image) in arrival.images.iter().enumerate() {
            let Image {
                start,
                tokens,
                bytes,
            } = image;
            let end = u64::from(start) + u64::from(tokens);
            if start < free || tokens == 0 || end > arrival.prompt.len() as u64 {
                return Err(Refusal::ImagePlace { index });
            }
            if tokens > most_tokens || bytes > most_bytes {
                return Err(Refusal::Image {
                    index,
                    tokens,
                    bytes,
                    most_tokens,
                    most_bytes,
                });
            }
            free = image.end();
        }
        let from = arrival.logprobs.and_then(|wanted| wanted.prompt_from);
        match from {
            Some(from) if from < free => Err(Refusal::ImageLogprobs { from, first: free }),
            _ => Ok(()),
        }
    }

    fn check_texts(&self, ends: &StopCriteria) -> Result<(), Refusal> {
        let any = !ends.stop_strings.is_empty() || ends.stop_regexes.is_some();
        if any && self.text.is_none() {
            return Err(Refusal::StopString);
        }
        Ok(())
    }
}
