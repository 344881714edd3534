//! Whether a request may enter: whether it would wait in vain, and who makes place for it. Pure.

use std::time::{Duration, Instant};

use super::{Left, Queue};
use crate::queue::class::{Class, Share};
use crate::queue::types::{NO_WORKER_TIMEOUT, Outcome, Refusal, RefusalReason, Request, SetBy};

/// A request enters the queue only if it is expected to meet its target with so much of it to spare, since later ones of
/// higher classes may come first, and a worker may be slower than on average.
const TARGET_PART: f64 = 0.9;

impl<T> Queue<T> {
    pub(super) fn refused(&self, reason: RefusalReason, class: usize) -> Refusal {
        Refusal {
            reason,
            retry_after: self.forecast().retry_after(reason, class),
        }
    }

    pub(super) fn refusal(
        &self,
        now: Instant,
        class: usize,
        request: &Request,
        cost: u64,
        target: Option<Duration>,
    ) -> Option<RefusalReason> {
        if self.waits_for_worker(request) && self.settings.no_worker_timeout.is_zero() {
            return Some(RefusalReason::NoWorker {
                waited: Duration::ZERO,
                setting: NO_WORKER_TIMEOUT,
            });
        }
        let target = target.filter(|_| !request.has_room)?;
        let elapsed = now.saturating_duration_since(request.received);
        let forecast = self.forecast();
        let wait = forecast.wait(class, request.client, cost)?;
        let expected = elapsed + wait + forecast.compute(cost);
        (expected > target.mul_f64(TARGET_PART))
            .then_some(RefusalReason::TargetUnreachable { target, expected })
    }

    /// Place for a request in its class. In a full one the client that has the most waiting makes it: who sends a flood pays
    /// for it.
    pub(super) fn make_place(
        &mut self,
        now: Instant,
        class: usize,
        request: &Request,
    ) -> Result<Vec<Left<T>>, RefusalReason> {
        let index = self.order[class];
        let own = self.settings.classes[index].max_requests;
        let (max_requests, set_by) = SetBy::of(own, index, self.settings.max_requests);
        let max_bytes = self.settings.max_size;
        // What is too much, for which reason, and who makes place for it: the heaviest client, if with all that it has to give
        // it still has no less than this one.
        let too_much = |of: &Class| {
            let requests = u64::from((of.requests + 1).saturating_sub(max_requests));
            let bytes = (of.bytes.saturating_add(request.bytes)).saturating_sub(max_bytes);
            let newest = |share, more| of.newest_of_heaviest(request.client, share, more);
            let of_requests = (requests > 0).then(|| {
                let max = max_requests;
                let reason = RefusalReason::TooManyRequests { max, set_by };
                (reason, newest(Share::Requests, requests))
            });
            let of_bytes = (bytes > 0).then(|| {
                let reason = RefusalReason::TooManyBytes { max: max_bytes };
                (reason, newest(Share::Bytes, request.bytes + bytes - 1))
            });
            [of_requests, of_bytes]
        };
        let all = too_much(&self.classes[class]);
        if let Some((reason, _)) = all.iter().flatten().find(|(_, newest)| newest.is_none()) {
            return Err(*reason);
        }
        let mut left = Vec::new();
        while let Some((reason, newest)) =
            too_much(&self.classes[class]).into_iter().flatten().next()
        {
            let Some(entry) = newest.and_then(|id| self.remove(id, false)) else {
                return Err(reason);
            };
            let refusal = self.refused(reason, class);
            left.push(self.left(entry, now, Outcome::Refused(refusal)));
        }
        Ok(left)
    }
}
