//! A request for the rest of an answer that another router process began.

use super::continuation::{Reader, Refusal, Resume};
use super::core::Relay;
use super::job::{Error, Job};
use super::plan::Plan;

impl Relay {
    /// Whether streams of any model may be continued.
    pub fn continues_streams(&self) -> bool {
        self.models.continues_streams()
    }
}

impl Plan {
    /// Has the worker go on with what another process began, if the request is for that. Otherwise it would begin again.
    pub(super) fn go_on(&mut self, job: &Job<'_>) -> Result<(), Error> {
        let Some(resume) = job.resume else {
            return Ok(());
        };
        self.go_on_after(resume)
            .map_err(|refusal| Error::NotContinued {
                reason: refusal.as_str(),
            })
    }

    fn go_on_after(&mut self, resume: &Resume) -> Result<(), Refusal> {
        if !resume.is_of(&self.group.model) {
            return Err(Refusal::OtherModel);
        }
        let settings = self.model.stream_continuation.ok_or(Refusal::Api)?;
        let request = self.continuation.take().ok_or(Refusal::Api)?;
        let (reader, body) = Reader::resumed(settings, (*request)?, resume)?;
        let tokens = &mut self.request.prompt_tokens;
        *tokens = tokens.saturating_add(reader.answer_tokens());
        self.body = Some(body);
        self.resumed = Some(Box::new(reader));
        // Its place in the body is another one now.
        self.report = None;
        Ok(())
    }
}
