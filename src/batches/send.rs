//! How lines of batches reach the fleet. The API implements it: a line is a request like any other there.

use std::fmt::Debug;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::line::LineEndpoint;
use super::memory_bounds::HeldAnswer;
use crate::ids::WorkerId;
use crate::relay::{EnteringLine, LinesByWorker, SpareRoom};

/// A line that is being answered. Dropped, it is given up, and its connection to an engine closed.
pub type SendFuture<'a> = Pin<Box<dyn Future<Output = LineAnswer> + Send + 'a>>;

/// A look-up of a model that is running.
pub type LookUpFuture<'a> = Pin<Box<dyn Future<Output = bool> + Send + 'a>>;

/// Sends lines, with the settings of the latest configuration.
pub trait SendLine: Send + Sync + Debug {
    /// Has an engine answer a line. What the router itself refuses is an answer, too.
    fn send(&self, line: LineRequest) -> SendFuture<'_>;

    /// What the fleet would take now for a model without making interactive requests wait.
    /// `lines`: those of this router that run.
    fn room(&self, model: &str, lines: &LinesByWorker) -> SpareRoom;

    /// Workers where interactive requests want the places of lines, and how many lines are to give way there.
    /// `entering`: lines that were let in and do not count at a worker yet.
    fn to_give_way(&self, lines: &LinesByWorker, entering: u32) -> Vec<(WorkerId, u32)>;

    /// Whether the configuration of this replica has the tenant. That of another replica may be newer.
    fn knows_tenant(&self, _tenant: &str) -> bool {
        true
    }

    /// Why a tenant that is known cannot use a model on an endpoint: a code and a message.
    fn refusal(
        &self,
        tenant: &str,
        model: &str,
        endpoint: LineEndpoint,
    ) -> Option<(String, String)>;

    /// Has the engines asked once more for a model that [`refusal`](Self::refusal) refuses: it may be an adapter that
    /// was loaded just now. True if the tenant can use it.
    fn look_up<'a>(&'a self, _tenant: &'a str, _model: &'a str) -> LookUpFuture<'a> {
        Box::pin(std::future::ready(false))
    }

    /// The tokens that all lines of a tenant's batches may have that have not ended. `None`: any number.
    fn tokens_queued_max(&self, _tenant: &str) -> Option<u64> {
        None
    }
}

/// One try of a line.
#[derive(Debug)]
pub struct LineRequest {
    /// The name of the tenant whose batch it is.
    pub tenant: Arc<str>,
    pub endpoint: LineEndpoint,
    /// As the body has it.
    pub model: Arc<str>,
    pub body: Bytes,
    pub batch: Arc<str>,
    /// Ends once the line counts at a worker.
    pub entering: EnteringLine,
    /// Grows with the answer's body before each part of it is kept.
    pub held: Arc<HeldAnswer>,
}

/// What a line was answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LineAnswer {
    pub status: u16,
    /// The router's id of the request.
    pub request_id: String,
    /// When to try again, if the answer says so.
    pub retry_after: Option<Duration>,
    /// False if another try would end in the same way.
    pub may_retry: bool,
    /// Another response of its conversation is running: nothing of the line has run.
    pub is_locked: bool,
    pub body: Bytes,
}
