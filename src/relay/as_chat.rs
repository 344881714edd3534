//! Requests of the Responses API for workers that speak chat completions only: which form a worker is sent.

use std::sync::Arc;

use bytes::Bytes;
use hyper::Response;

use super::choose::chosen::Choice;
use super::choose::failed_workers::FailedWorkers;
use super::core::Relay;
use super::job::{Error, FailedRequest, Job, NotConvertible, ToolLoss};
use super::plan::Plan;
use super::request::body_edit;
use crate::fleet::{ChatWorkers, Group};
use crate::http::Body;
use crate::prompt::Api;

impl Relay {
    /// Whether requests of the Responses API for this model are sent as chat completions, whichever worker is chosen. The
    /// prompt's tokens are then those of the chat completion.
    pub fn sends_chat(&self, model: Option<&str>) -> bool {
        match self.chat_workers(model) {
            ChatWorkers::None => false,
            // The two legs of a request have one form.
            ChatWorkers::Some => self.prefill_decode.is_some(),
            ChatWorkers::All => true,
        }
    }

    /// Whether the router has the model's template and knows that it fails on a system message after the head.
    pub fn refuses_later_system(&self, model: Option<&str>) -> bool {
        let group = self.group(model);
        group.is_ok_and(|group| self.tokens.refuses_later_system(&group))
    }

    fn chat_workers(&self, model: Option<&str>) -> ChatWorkers {
        let group = self.group(model);
        group.map_or(ChatWorkers::None, |group| group.chat_workers)
    }

    /// The request as a chat completion, if all workers are sent that. An error if no worker could take it.
    pub(super) fn chat_for_all<'a>(
        &self,
        job: &Job<'a>,
        model: Option<&str>,
    ) -> Result<Option<Job<'a>>, Error> {
        let Some(chat) = job.chat.filter(|_| self.sends_chat(model)) else {
            return Ok(None);
        };
        let loss = tool_loss(self.chat_workers(model));
        match chat.chat_body(&job.body, loss) {
            Ok(body) => Ok(Some(job.as_chat(body))),
            Err(_) if loss == ToolLoss::Refused => Ok(None),
            Err(why) => Err(Error::NotConvertible(why)),
        }
    }

    pub(super) async fn carry_chat(
        self: &Arc<Self>,
        job: &Job<'_>,
    ) -> Result<Response<Body>, FailedRequest> {
        let peek = body_edit::read_again(Api::Chat, &job.body, self.block_bytes(), "");
        self.carry(job, Box::new(peek)).await
    }

    /// The request in the form of the chosen worker; `None` if that is the job's own form. Of a model with workers of both
    /// kinds a retry may need the other form. An error if it can only go to a worker with the Responses API, if there is one.
    pub(super) fn converted<'a>(
        &self,
        job: &Job<'a>,
        plan: &Plan,
        choice: &Choice,
        loss: ToolLoss,
    ) -> Result<Option<Box<Job<'a>>>, NotConvertible> {
        let Some(chat) = job.chat else {
            return Ok(None);
        };
        if !plan.group.speaks_chat_only(choice.worker.id) {
            return Ok(None);
        }
        let body: Bytes = chat.chat_body(&job.body, loss)?;
        // Boxed, so that other requests do not carry the place of a second job.
        Ok(Some(Box::new(job.as_chat(body))))
    }
}

/// What becomes of tools that a chat completion cannot have, of a model of whose workers so many are sent one.
fn tool_loss(workers: ChatWorkers) -> ToolLoss {
    match workers {
        ChatWorkers::None | ChatWorkers::Some => ToolLoss::Refused,
        ChatWorkers::All => ToolLoss::AsConfigured,
    }
}

impl Plan {
    pub(super) fn tool_loss(&self) -> ToolLoss {
        tool_loss(self.group.chat_workers)
    }
}

impl FailedWorkers {
    /// Excludes the workers that speak chat completions only.
    pub(super) fn exclude_chat(&mut self, group: &Group) {
        let workers = group.workers.iter().map(|worker| worker.id);
        self.exclude_all(workers.filter(|id| group.speaks_chat_only(*id)));
    }
}
