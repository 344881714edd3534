//! A gateway that asks over `ext_proc`, for one request: what the relay hands over to it, and the answer that comes back.

use std::net::IpAddr;
use std::pin::Pin;

use bytes::Bytes;
use hyper::HeaderMap;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::messages::{self, Destination};
use super::wire::ProcessingResponse;
use crate::fleet::Worker;
use crate::relay::{CarriedAnswer, Gateway, Handover};

/// What differs between configurations.
#[derive(Clone, Copy, Debug)]
pub(super) struct Options {
    /// Conformance tests of gateways may choose, and see who served.
    pub(super) has_hooks: bool,
    pub(super) fallbacks: usize,
}

#[derive(Debug)]
pub(super) struct ExtProcGateway {
    /// The workers among which the choice must be. `None`: any.
    subset: Option<Vec<String>>,
    /// The headers that the gateway has of its client.
    client: HeaderMap,
    options: Options,
    /// Once: what was handed over cannot be taken back.
    handover: Mutex<Option<oneshot::Sender<HandedOver>>>,
}

/// A request on its way to a worker.
#[derive(Debug)]
pub(super) struct HandedOver {
    /// The answer to the request's head.
    pub(super) chosen: ProcessingResponse,
    pub(super) body: Bytes,
    /// Gets the beginning of the worker's answer.
    pub(super) answer: oneshot::Sender<CarriedAnswer>,
}

impl ExtProcGateway {
    /// The gateway, and what is handed over to it, if anything is.
    pub(super) fn new(
        client: HeaderMap,
        metadata: &Bytes,
        options: Options,
    ) -> (Self, oneshot::Receiver<HandedOver>) {
        let (handover, receiver) = oneshot::channel();
        let gateway = Self {
            subset: messages::subset(metadata, &client, options.has_hooks),
            client,
            options,
            handover: Mutex::new(Some(handover)),
        };
        (gateway, receiver)
    }

    async fn carry(&self, handover: Handover<'_>) -> CarriedAnswer {
        let (answer, answered) = oneshot::channel();
        let workers: Vec<&str> = handover
            .workers
            .iter()
            .map(|worker| address(worker))
            .collect();
        let destination = Destination {
            workers: workers.join(","),
            prefill: handover.prefill.map(|prefill| address(prefill).to_owned()),
            has_hooks: self.options.has_hooks,
        };
        let handed_over = HandedOver {
            chosen: messages::chosen(&self.client, handover.headers, &destination),
            body: handover.body.clone(),
            answer,
        };
        let waiting = self.handover.lock().take();
        let is_taken = waiting.is_some_and(|sender| sender.send(handed_over).is_ok());
        match answered.await {
            Ok(answer) if is_taken => answer,
            // The exchange is over, and what waits for this with it.
            _ => std::future::pending().await,
        }
    }
}

impl Gateway for ExtProcGateway {
    fn fallbacks(&self) -> usize {
        self.options.fallbacks
    }

    /// Gateways take addresses, never names, and know no paths.
    fn may_reach(&self, worker: &Worker) -> bool {
        let Some(host) = ip_address(worker) else {
            return false;
        };
        let Some(subset) = &self.subset else {
            return true;
        };
        let is_in =
            |entry: &String| entry == address(worker) || entry.trim_matches(['[', ']']) == host;
        subset.iter().any(is_in)
    }

    fn send<'a>(
        &'a self,
        handover: Handover<'a>,
    ) -> Pin<Box<dyn Future<Output = CarriedAnswer> + Send + 'a>> {
        Box::pin(self.carry(handover))
    }
}

fn address(worker: &Worker) -> &str {
    worker.pool.authority()
}

/// The IP address of a worker that a gateway can send requests to.
fn ip_address(worker: &Worker) -> Option<&str> {
    let address = address(worker);
    if address != worker.pool.address() {
        return None;
    }
    let (host, _) = address.rsplit_once(':')?;
    let host = host.trim_matches(['[', ']']);
    host.parse::<IpAddr>().is_ok().then_some(host)
}
