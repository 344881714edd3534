//! A stream that router processes write one after the other.

use std::sync::Arc;

use bytes::Bytes;

use super::Reader;
use crate::relay::continuation::progress::{Counts, Progress, Resume};
use crate::relay::continuation::refusal::Refusal;
use crate::relay::continuation::request::Request;
use crate::relay::continuation::settings::Settings;

impl Reader {
    /// Goes on with a stream of which another process passed the beginning. Returns the body for the worker, too.
    pub(in crate::relay) fn resumed(
        settings: Settings,
        request: Request,
        resume: &Resume,
    ) -> Result<(Self, Bytes), Refusal> {
        let Resume {
            counts,
            prompt,
            answer,
            model: _,
        } = resume;
        if let Some(refusal) = counts.refusal {
            return Err(refusal);
        }
        if prompt.len() + answer.len() > settings.max_tokens as usize {
            return Err(Refusal::TooLong);
        }
        let mut reader = Self {
            prompt: prompt.clone(),
            answer: answer.clone(),
            settled: answer.len(),
            reasoning: counts.reasoning as usize,
            last_ids: counts.last_ids as usize,
            has_role: true,
            has_text: true,
            times: counts.times,
            ..Self::new(settings, request, counts.cached.into())
        };
        let body = reader.next_body()?;
        Ok((reader, body))
    }

    /// Notes what was passed in `progress`.
    pub(in crate::relay) fn report_to(&mut self, progress: Arc<Progress>, model: &str) {
        progress.begin(model);
        self.progress = Some(progress);
    }

    pub(super) fn report(&self) {
        let Some(progress) = &self.progress else {
            return;
        };
        let finished = self.has_finish.then_some(Refusal::Finished);
        let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let counts = Counts {
            times: self.times,
            reasoning: count(self.reasoning),
            last_ids: count(self.last_ids),
            cached: u32::try_from(self.cached_tokens).unwrap_or(u32::MAX),
            refusal: self.refusal.or(finished),
        };
        progress.note(counts, &self.prompt, &self.answer[..self.settled]);
    }
}
