//! Requests that a gateway carries: the relay decides and counts as always, and the gateway has the connection to the
//! worker.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use hyper::HeaderMap;
use hyper::http::response;
use smallvec::SmallVec;

use crate::fleet::Worker;
use crate::http::client::EngineBody;

/// Who has the connections to the workers, for one request.
pub trait Gateway: fmt::Debug + Send + Sync {
    /// How many workers it tries after the chosen one.
    fn fallbacks(&self) -> usize;

    fn may_reach(&self, worker: &Worker) -> bool;

    /// Has the request sent. Resolves with the beginning of the answer; dropped, the request is given up.
    fn send<'a>(
        &'a self,
        handover: Handover<'a>,
    ) -> Pin<Box<dyn Future<Output = CarriedAnswer> + Send + 'a>>;
}

/// A request, and where it is to go.
#[derive(Debug)]
pub struct Handover<'a> {
    /// The chosen one, and then those to try if it cannot be reached, at the lowest cost first.
    pub workers: &'a [Arc<Worker>],
    /// The worker that is to compute the prompt, if another one generates.
    pub prefill: Option<&'a Arc<Worker>>,
    /// As the worker is to get them.
    pub headers: &'a HeaderMap,
    pub body: &'a Bytes,
}

/// The beginning of an answer that a gateway receives.
#[derive(Debug)]
pub struct CarriedAnswer {
    pub head: response::Parts,
    pub body: EngineBody,
    /// `host:port` of the worker that answered, if the gateway says which it was.
    pub served: Option<String>,
}

/// An extension of a request that a gateway carries.
#[derive(Clone, Debug)]
pub struct CarriedBy(pub Arc<dyn Gateway>);

/// Where a gateway is to send a request.
#[derive(Debug)]
pub(in crate::relay) struct CarriedTo<'a> {
    pub(in crate::relay) gateway: &'a dyn Gateway,
    /// The chosen one first.
    pub(in crate::relay) workers: SmallVec<[Arc<Worker>; 4]>,
    pub(in crate::relay) prefill: Option<Arc<Worker>>,
}
