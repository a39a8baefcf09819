//! Validation of requests against the limits.

use crate::config::RowExtras;
use crate::error::ValidationError;
use crate::new_request::{Image, NewRequest};
use crate::scheduler::Scheduler;
use crate::stop_criteria::StopCriteria;

/// Most sequences of one request.
pub const MAX_SAMPLES: u32 = 1 << 16;

impl<S> Scheduler<S> {
    /// Validation of requests against the limits.
    pub(crate) fn check(&self, request: &NewRequest<S>) -> Result<u32, ValidationError> {
        let (id, prompt, ends) = (request.id, &request.prompt, &request.stop);
        if self.requests.contains_key(&id) {
            return Err(ValidationError::Known { id });
        }
        if prompt.is_empty() {
            return Err(ValidationError::Empty);
        }
        self.check_images(request)?;
        self.check_tokens(request)?;
        if !(1..=MAX_SAMPLES).contains(&request.samples) {
            return Err(ValidationError::Samples {
                samples: request.samples,
                limit: MAX_SAMPLES,
            });
        }
        let (min, max) = (ends.min_tokens, ends.max_tokens);
        if min > max {
            return Err(ValidationError::MinTokens { min, max });
        }
        self.check_texts(ends)?;
        let limit = self.limits.max_logprob_words;
        match request.logprobs.map(|wanted| wanted.words) {
            Some(words) if words > limit => return Err(ValidationError::Logprobs { words, limit }),
            _ => {}
        }
        let (limit, reason) = self.limits.longest();
        if prompt.len() > limit as usize {
            let tokens = prompt.len();
            return Err(ValidationError::TooLong {
                tokens,
                limit,
                reason,
            });
        }
        self.check_row(request, limit)?;
        // The last token is given out and not stored.
        Ok(limit - prompt.len() as u32 + 1)
    }

    /// Whether a frame has room for one token of it, however long it becomes.
    fn check_row(&self, request: &NewRequest<S>, longest: u32) -> Result<(), ValidationError> {
        let (ends, frame) = (&request.stop, &self.limits.frame);
        let most = request.prompt.len() as u32;
        let most = most.saturating_add(ends.max_tokens).min(longest);
        let more = RowExtras {
            own: request.params_bytes,
            listed: if request.whole_history {
                most
            } else {
                most - request.prompt.len() as u32
            },
            forbidden: if ends.min_tokens > 0 {
                ends.stop_tokens.len() as u32
            } else {
                0
            },
            masked: request.grammar.is_some(),
        };
        // An image is in one row.
        let images = request.images.iter().map(|image| image.tokens);
        let tokens = images.max().unwrap_or(1);
        let bytes = frame.of_row((tokens, 0, most.div_ceil(self.limits.page_size)), more);
        if bytes > frame.max.into() {
            let limit = frame.max;
            return Err(ValidationError::RowBytes { bytes, limit });
        }
        Ok(())
    }

    fn check_tokens(&self, request: &NewRequest<S>) -> Result<(), ValidationError> {
        let vocab = self.limits.vocab_size;
        let mut from = 0;
        let ends = request
            .images
            .iter()
            .map(|image| (image.start as usize, image.end() as usize));
        for (start, next) in ends.chain([(request.prompt.len(), 0)]) {
            let text = &request.prompt[from..start];
            if let Some(index) = text.iter().position(|&token| token >= vocab) {
                let (token, at) = (text[index], from + index);
                return Err(ValidationError::Token { token, at, vocab });
            }
            from = next;
        }
        Ok(())
    }

    fn check_images(&self, request: &NewRequest<S>) -> Result<(), ValidationError> {
        let (most_tokens, most_bytes) = (self.limits.image_tokens(), self.limits.max_image_bytes);
        let mut free = 0;
        for (index, &image) in request.images.iter().enumerate() {
            let Image {
                start,
                tokens,
                bytes,
            } = image;
            let end = u64::from(start) + u64::from(tokens);
            if start < free || tokens == 0 || end > request.prompt.len() as u64 {
                return Err(ValidationError::ImageRange { index });
            }
            if tokens > most_tokens || bytes > most_bytes {
                return Err(ValidationError::Image {
                    index,
                    tokens,
                    bytes,
                    most_tokens,
                    most_bytes,
                });
            }
            free = image.end();
        }
        let from = request.logprobs.and_then(|wanted| wanted.prompt_from);
        match from {
            Some(from) if from < free => Err(ValidationError::ImageLogprobs { from, first: free }),
            _ => Ok(()),
        }
    }

    fn check_texts(&self, ends: &StopCriteria) -> Result<(), ValidationError> {
        let any = !ends.stop_strings.is_empty() || ends.stop_regexes.is_some();
        if any && self.text.is_none() {
            return Err(ValidationError::StopString);
        }
        Ok(())
    }
}
