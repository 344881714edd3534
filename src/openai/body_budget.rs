//! The memory budget of all clients' request bodies together. Bytes count as they arrive.
//!
//! While less than half of the budget is used, short bodies (up to 64 KiB) count without a lock and without their
//! owner. All others count for their owner, whose share is bounded (`shares`). A body for which there is no room waits
//! for its turn, for a bounded time. Requests of lower priority that wait in the queue give their memory up for it. If
//! bodies that wait hold too much of the window of its HTTP/2 connection, it waits only for what those give up, and is
//! refused if that is not enough.
//!
//! What a body refers to, such as the history of a response, counts with it. It is in memory when its size is known, so
//! it never waits: there is room for it, or the request drops it, waits for its size, and reads it again. A request
//! that does not read it again, such as a line of a batch, is refused.
//!
//! A body that outlives its request, as that of a background response, keeps its memory (`KeptBody`), which may be an
//! hour: bodies of one owner that are kept get half as much as its share, on top of it.

mod memory;
mod shares;

use std::cmp::Reverse;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::Duration;

use hyper::HeaderMap;
use prometheus::IntCounter;
use tokio::sync::oneshot;

pub use self::memory::BodyMemory;
pub(crate) use self::memory::KeptBody;
use self::memory::{LAST, SMALL_BYTES, rounded, wake};
use self::shares::{Ask, Place, Stage};
use crate::http::server::Unread;
use crate::ids::{ClientKey, Tenant};
use crate::observe::metrics::Registry;
use crate::openai::error::ApiError;
use crate::relay::Relay;

/// The memory that bodies take, from the first byte until an engine has started to answer.
#[derive(Debug)]
pub(crate) struct BodyBudget {
    memory: Arc<BodyMemory>,
    max: u64,
    max_wait: Duration,
    waited: IntCounter,
    refused: IntCounter,
}

/// Whose a body is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Claim<'a> {
    pub(crate) owner: ClientKey,
    pub(crate) tenant: Tenant,
    pub(crate) headers: &'a HeaderMap,
    /// Knows its priority, and which requests wait for workers. `None`: the body comes after all others, and none gives
    /// its memory up for it.
    pub(crate) relay: Option<&'a Relay>,
}

impl Claim<'_> {
    fn priority(&self) -> i32 {
        let relay = self.relay;
        relay.map_or(LAST, |relay| relay.priority_of(self.tenant, self.headers))
    }

    /// Bytes that requests of lower priority give up. `all_or_none`: they give none unless they give so many.
    fn make_room(&self, bytes: u64, all_or_none: bool) -> u64 {
        match self.relay {
            Some(relay) if bytes > 0 => relay.queues().give_up(self.priority(), bytes, all_or_none),
            _ => 0,
        }
    }
}

impl BodyBudget {
    pub(crate) fn new(
        memory: Arc<BodyMemory>,
        max: u64,
        max_wait: Duration,
        registry: &Registry,
    ) -> Self {
        memory.set_max(max);
        let bytes = registry.gauge(
            "warmroute_request_body_bytes",
            "Memory of request bodies that no engine has started to answer, with the histories that they continue, and \
             of background responses until they have ended.",
        );
        let waiting = registry.gauge(
            "warmroute_request_bodies_waiting",
            "Requests whose body waits for memory.",
        );
        let read = memory.clone();
        registry.on_scrape(move || {
            bytes.set(read.used.load(Relaxed) as i64);
            waiting.set(read.shares.lock().waiting as i64);
        });
        Self {
            memory,
            max,
            max_wait,
            waited: registry.counter(
                "warmroute_request_bodies_waited_total",
                "Requests whose body had to wait because the bodies of all clients together had used up their memory \
                 budget, or those of its own client their share of it.",
            ),
            refused: registry.counter(
                "warmroute_request_bodies_refused_total",
                "Requests refused because the bodies of all clients together had used up their memory budget, or those of \
                 its own client their share of it: after a wait, or at once where bodies that wait hold much of the \
                 window of their HTTP/2 connection.",
            ),
        }
    }

    /// With other bounds, and with the bodies of this one.
    pub(crate) fn successor(&self, max: u64, max_wait: Duration) -> Self {
        self.memory.set_max(max);
        Self {
            memory: self.memory.clone(),
            max,
            max_wait,
            waited: self.waited.clone(),
            refused: self.refused.clone(),
        }
    }

    /// Waits until a body that announces this size may be read, and holds up no other one while it waits.
    pub(crate) async fn start<'a>(
        &'a self,
        claim: Claim<'a>,
        announced: u64,
    ) -> Result<Reservation<'a>, ApiError> {
        self.start_unread(claim, announced, |_| Some(Unread::default()))
            .await
    }

    /// Waits until a body that announces this size may be read. Nothing is reserved for bytes that may never come.
    /// `leave_unread`: as that of [`Reservation::grow_unread`].
    pub(crate) async fn start_unread<'a>(
        &'a self,
        claim: Claim<'a>,
        announced: u64,
        leave_unread: impl FnOnce(bool) -> Option<Unread>,
    ) -> Result<Reservation<'a>, ApiError> {
        let mut reservation = Reservation {
            budget: self,
            claim,
            number: 0,
            body_bytes: 0,
            bytes: 0,
            is_owned: false,
            has_waited: false,
            waits: 0,
            lacking: None,
        };
        if announced > SMALL_BYTES {
            let ask = reservation.ask(Stage::New, announced, announced);
            let waits = self.wait(&claim, ask, announced, false, leave_unread);
            reservation.has_waited = waits.await?;
        }
        Ok(reservation)
    }

    /// The error for a request without memory, which is counted.
    fn refuse(&self) -> ApiError {
        self.refused.inc();
        ApiError::bodies_full()
    }

    /// Asks until the answer comes, for `max_wait` at most. True if there was no room at once.
    async fn wait(
        &self,
        claim: &Claim<'_>,
        ask: Ask,
        total: u64,
        has_waited: bool,
        leave_unread: impl FnOnce(bool) -> Option<Unread>,
    ) -> Result<bool, ApiError> {
        if total > self.max {
            // There will never be room.
            return Err(ApiError::too_large(self.max));
        }
        let memory = &*self.memory;
        // Mostly there is room, and no timer is needed.
        if memory.shares.lock().try_now(&ask) {
            return Ok(false);
        }
        // Kept until the wait has ended.
        let unread = leave_unread(ask.place.stage == Stage::Growing);
        let mut given = 0;
        if unread.is_none() {
            // It may wait only for what others give up at once.
            let lacks = memory.shares.lock().lacks(&ask);
            given = claim.make_room(lacks, true);
            if given == 0 {
                return Err(self.refuse());
            }
            memory.shares.lock().expect(given);
        }
        let (body, ended) = oneshot::channel();
        let mut waiting = Waiting { memory, ask, ended };
        memory.asking.fetch_add(1, SeqCst);
        let lacks = {
            let mut shares = memory.shares.lock();
            let lacks = shares.lacks(&ask);
            wake(shares.enter(ask, body));
            lacks
        };
        match waiting.ended.try_recv() {
            Ok(true) => return Ok(false),
            Ok(false) => return Err(self.refuse()),
            Err(_) => {}
        }
        if given == 0 {
            let given = claim.make_room(lacks, false);
            memory.shares.lock().expect(given);
        }
        if !has_waited {
            self.waited.inc();
        }
        let ended = tokio::time::timeout(self.max_wait, &mut waiting.ended).await;
        match ended {
            Ok(Ok(true)) => Ok(true),
            _ => Err(self.refuse()),
        }
    }
}

/// A body that waits. Dropped, it waits no longer.
struct Waiting<'a> {
    memory: &'a BodyMemory,
    ask: Ask,
    ended: oneshot::Receiver<bool>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.memory.asking.fetch_sub(1, SeqCst);
        let mut shares = self.memory.shares.lock();
        if !shares.leave(&self.ask) && self.ended.try_recv() == Ok(true) {
            // It was granted just when the wait ended.
            shares.take_back(&self.ask);
        }
        wake(shares.settle());
    }
}

/// One body's part of the budget, given back when dropped.
#[derive(Debug)]
pub(crate) struct Reservation<'a> {
    budget: &'a BodyBudget,
    claim: Claim<'a>,
    /// 0 until the body has asked for memory that counts for its owner.
    number: u64,
    /// What has come of the body.
    body_bytes: u64,
    bytes: u64,
    /// They count for its owner.
    is_owned: bool,
    /// It counts once, however often it waits for more.
    has_waited: bool,
    /// How often it may still wait for what its body refers to, since it can read that again.
    waits: u32,
    /// It waits for so many bytes in all next.
    lacking: Option<u64>,
}

/// A body refers to a history, and to items beside it.
const WAITS_MAX: u32 = 2;

impl Reservation<'_> {
    /// Makes it large enough for a body of this size, which holds up no other one. True if that had to be waited for.
    pub(crate) async fn grow(&mut self, bytes: u64) -> Result<bool, ApiError> {
        self.grow_unread(bytes, |_| Some(Unread::default())).await
    }

    /// Makes it large enough for a body of this size. True if that had to be waited for. `leave_unread` is asked only
    /// then: what the rest of the body holds of its connection's window meanwhile, and by whether what came before has
    /// memory that counts for its owner. `None`: it may wait only for what requests of lower priority give up.
    pub(crate) async fn grow_unread(
        &mut self,
        bytes: u64,
        leave_unread: impl FnOnce(bool) -> Option<Unread>,
    ) -> Result<bool, ApiError> {
        self.body_bytes = bytes;
        self.wait_for(bytes, leave_unread).await
    }

    async fn wait_for(
        &mut self,
        bytes: u64,
        leave_unread: impl FnOnce(bool) -> Option<Unread>,
    ) -> Result<bool, ApiError> {
        let Some(ask) = self.needs(bytes) else {
            return Ok(false);
        };
        let total = self.bytes + ask.more;
        let waits = self
            .budget
            .wait(&self.claim, ask, total, self.has_waited, leave_unread);
        // Boxed, so that bodies that find room do not carry the state of a wait.
        let waited = Box::pin(waits).await?;
        self.has_waited |= waited;
        self.on_granted(&ask);
        Ok(waited)
    }

    /// Makes it large enough for the body and for so many bytes that the body refers to. It does not wait: those bytes
    /// are in memory already, and their conversation may be locked. A request that can read them again then calls
    /// [`Reservation::wait_for_lacking`].
    pub(crate) fn grow_beyond_body(&mut self, bytes: u64) -> Result<(), ApiError> {
        let total = self.body_bytes.saturating_add(bytes);
        if total > self.budget.max {
            return Err(ApiError::too_large_with_history(self.budget.max));
        }
        let Some(ask) = self.needs(total) else {
            return Ok(());
        };
        if !self.budget.memory.shares.lock().try_now(&ask) {
            if self.waits > 0 {
                self.waits -= 1;
                self.lacking = Some(total);
                return Err(ApiError::bodies_full());
            }
            return Err(self.budget.refuse());
        }
        self.on_granted(&ask);
        Ok(())
    }

    /// The caller can read again what the body refers to, and asks for what was lacking. A body that comes after all
    /// others is still refused.
    pub(crate) fn let_wait(&mut self) {
        if self.claim.relay.is_some() {
            self.waits = WAITS_MAX;
        }
    }

    /// Waits for what the body and all that it refers to lacked, in the body's place. What it refers to must have been
    /// dropped and unlocked. False if it lacked nothing.
    pub(crate) async fn wait_for_lacking(&mut self) -> Result<bool, ApiError> {
        let Some(bytes) = self.lacking.take() else {
            return Ok(false);
        };
        self.wait_for(bytes, |_| Some(Unread::default())).await?;
        Ok(true)
    }

    /// False if it lacks memory that its owner could not keep after the request, even if no other request had any.
    pub(crate) fn may_keep_lacking(&self) -> bool {
        let shares = self.budget.memory.shares.lock();
        let owner = self.claim.owner;
        self.lacking
            .is_none_or(|bytes| shares.may_keep_at_last(owner, rounded(bytes)))
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Hands the memory over to what goes on after the request. `None` if its owner keeps as much as it may.
    pub(crate) fn try_keep(&mut self) -> Option<KeptBody> {
        let (memory, owner) = (&self.budget.memory, self.claim.owner);
        let mut shares = memory.shares.lock();
        if !shares.keep(owner, self.bytes, self.is_owned) {
            return None;
        }
        wake(shares.settle());
        self.is_owned = false;
        Some(KeptBody {
            memory: memory.clone(),
            owner,
            bytes: std::mem::take(&mut self.bytes),
        })
    }

    /// What it has to ask for before it has so many bytes, if anything.
    fn needs(&mut self, bytes: u64) -> Option<Ask> {
        if bytes <= self.bytes {
            return None;
        }
        let is_small = bytes <= SMALL_BYTES;
        // The last step may be a short one.
        let total = rounded(bytes).min(bytes.max(self.budget.max));
        let more = total - self.bytes;
        if is_small && !self.is_owned && self.budget.memory.take_unowned(more) {
            self.bytes = total;
            return None;
        }
        let stage = if self.is_owned {
            Stage::Growing
        } else {
            Stage::Beginning
        };
        Some(self.ask(stage, more, bytes))
    }

    fn on_granted(&mut self, ask: &Ask) {
        self.bytes += ask.more;
        self.is_owned = true;
    }

    fn ask(&mut self, stage: Stage, more: u64, total: u64) -> Ask {
        if self.number == 0 {
            self.number = self.budget.memory.next_number();
        }
        Ask {
            place: Place {
                stage,
                priority: Reverse(self.claim.priority()),
                number: self.number,
            },
            owner: self.claim.owner,
            more,
            has: self.bytes,
            is_small: total <= SMALL_BYTES,
        }
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        let memory = &*self.budget.memory;
        if self.is_owned {
            let mut shares = memory.shares.lock();
            shares.give_back(self.claim.owner, self.bytes);
            wake(shares.settle());
        } else if self.bytes > 0 {
            memory.give_unowned(self.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    struct Rig {
        budget: BodyBudget,
        headers: HeaderMap,
    }

    impl Rig {
        fn new(max: u64, max_wait: Duration) -> Self {
            Self {
                budget: BodyBudget::new(BodyMemory::new(max), max, max_wait, &Registry::default()),
                headers: HeaderMap::new(),
            }
        }

        /// A body of `owner` of which all has come.
        async fn read(&self, owner: u64, bytes: u64) -> Result<Reservation<'_>, ApiError> {
            let claim = Claim {
                owner: ClientKey(owner),
                tenant: Tenant::default(),
                headers: &self.headers,
                relay: None,
            };
            let mut body = self.budget.start(claim, bytes).await?;
            body.grow(bytes).await?;
            Ok(body)
        }

        fn used(&self) -> u64 {
            self.budget.memory.used.load(Relaxed)
        }

        fn counts(&self) -> (u64, u64) {
            (self.budget.waited.get(), self.budget.refused.get())
        }
    }

    #[tokio::test]
    async fn every_byte_counts_until_its_body_is_dropped() {
        let rig = Rig::new(MIB, Duration::from_secs(60));
        let small = rig.read(1, 2_000).await.unwrap();
        assert_eq!(rig.used(), 2_000);
        let claim = small.claim;
        let mut growing = rig.budget.start(claim, 0).await.unwrap();
        for (bytes, counted) in [(10, 10), (60_000, 60_000), (70_000, 256 << 10)] {
            growing.grow(bytes).await.unwrap();
            assert_eq!(rig.used(), 2_000 + counted);
        }
        drop(growing);
        assert_eq!(rig.used(), 2_000);
        drop(small);
        assert_eq!(rig.used(), 0);
        assert_eq!(rig.counts(), (0, 0));
    }

    #[tokio::test]
    async fn a_flood_of_short_bodies_leaves_room_for_those_of_others() {
        let rig = Rig::new(MIB, Duration::ZERO);
        let mut flood = Vec::new();
        while let Ok(body) = rig.read(1, 60_000).await {
            flood.push(body);
        }
        // Half of the memory, and twice what is left of the other half.
        assert!((13..=15).contains(&flood.len()), "{}", flood.len());
        for owner in 2..20 {
            assert!(rig.read(owner, 2_000).await.is_ok(), "{owner}");
        }
        drop(flood);
        assert_eq!(rig.used(), 0);
    }

    #[tokio::test]
    async fn a_body_waits_for_its_turn() {
        let rig = Rig::new(MIB, Duration::from_secs(60));
        let large = rig.read(1, 700 << 10).await.unwrap();
        assert_eq!(rig.used(), 768 << 10);
        let small = rig.read(2, 1_000).await.unwrap();
        let other = async { rig.read(2, 200 << 10).await.unwrap() };
        let end_first = async {
            while rig.counts().0 == 0 {
                tokio::task::yield_now().await;
            }
            assert_eq!(rig.used(), (768 << 10) + 1_000);
            drop(large);
        };
        let (other, ()) = tokio::join!(other, end_first);
        assert_eq!(rig.used(), (256 << 10) + 1_000);
        drop((other, small));
        assert_eq!(rig.used(), 0);
        assert_eq!(rig.counts(), (1, 0));
    }

    #[tokio::test]
    async fn a_body_that_waits_for_short_ones_goes_on_when_they_end() {
        let rig = Rig::new(MIB, Duration::from_secs(60));
        let mut small = Vec::new();
        for _ in 0..8 {
            small.push(rig.read(1, 60_000).await.unwrap());
        }
        let large = async { rig.read(2, 600 << 10).await.unwrap() };
        let end = async {
            while rig.counts().0 == 0 {
                tokio::task::yield_now().await;
            }
            small.clear();
        };
        let (large, ()) = tokio::join!(large, end);
        assert_eq!(rig.used(), 768 << 10);
        drop(large);
    }

    #[tokio::test]
    async fn a_wait_is_bounded_and_what_never_fits_does_not_wait() {
        let rig = Rig::new(MIB, Duration::from_millis(20));
        let large = rig.read(1, MIB).await.unwrap();
        assert!(rig.read(2, MIB).await.is_err());
        let refused = rig.read(2, 2 * MIB).await.unwrap_err();
        assert_eq!(refused.status, hyper::StatusCode::PAYLOAD_TOO_LARGE);
        assert_eq!(rig.counts(), (1, 1));
        drop(large);
        assert!(rig.read(2, MIB).await.is_ok());
        assert_eq!(rig.used(), 0);
    }

    #[tokio::test]
    async fn a_body_that_may_not_be_left_unread_does_not_wait() {
        let rig = Rig::new(MIB, Duration::from_secs(60));
        let mut large = rig.read(1, 200 << 10).await.unwrap();
        let claim = large.claim;
        // There is room.
        let announced = rig.budget.start_unread(claim, 100 << 10, |_| None).await;
        assert!(announced.is_ok());
        assert!(!large.grow_unread(500 << 10, |_| None).await.unwrap());
        let refused = rig.budget.start_unread(claim, 100 << 10, |_| None).await;
        assert_eq!(refused.unwrap_err().code, ApiError::bodies_full().code);
        let mut other = rig.read(2, 100).await.unwrap();
        assert!(other.grow_unread(600 << 10, |_| None).await.is_err());
        assert_eq!(rig.counts(), (0, 2));
        drop((large, other));
        assert_eq!(rig.used(), 0);
    }

    #[tokio::test]
    async fn what_a_body_holds_unread_depends_on_whether_it_has_memory() {
        let rig = Rig::new(MIB, Duration::ZERO);
        let mut large = rig.read(1, 300 << 10).await.unwrap();
        let mut other = rig.read(2, 100 << 10).await.unwrap();
        let mut asked = Vec::new();
        let mut leave_unread = |has_memory: bool| -> Option<Unread> {
            asked.push(has_memory);
            None
        };
        // There is no room for any of these.
        let start = rig
            .budget
            .start_unread(large.claim, 900 << 10, &mut leave_unread);
        assert!(start.await.is_err());
        let mut started = rig.budget.start(large.claim, 0).await.unwrap();
        assert!(
            started
                .grow_unread(100 << 10, &mut leave_unread)
                .await
                .is_err()
        );
        assert!(
            large
                .grow_unread(900 << 10, &mut leave_unread)
                .await
                .is_err()
        );
        // It has so much.
        assert!(
            !other
                .grow_unread(100 << 10, &mut leave_unread)
                .await
                .unwrap()
        );
        assert_eq!(asked, [false, false, true]);
    }

    #[tokio::test]
    async fn what_a_body_refers_to_counts_with_it() {
        let rig = Rig::new(MIB, Duration::from_secs(60));
        let mut body = rig.read(1, 2_000).await.unwrap();
        body.grow_beyond_body(1_000).unwrap();
        assert_eq!(rig.used(), 3_000);
        // The same history, read again.
        body.grow_beyond_body(1_000).unwrap();
        assert_eq!(rig.used(), 3_000);
        // There will never be room.
        let refused = body.grow_beyond_body(MIB).unwrap_err();
        assert_eq!(refused.status, hyper::StatusCode::PAYLOAD_TOO_LARGE);
        assert_eq!(refused.code, ApiError::too_large(MIB).code);
        // There is none now.
        let other = rig.read(2, 300 << 10).await.unwrap();
        let refused = body.grow_beyond_body(600 << 10).unwrap_err();
        assert_eq!(refused.code, ApiError::bodies_full().code);
        assert_eq!(rig.used(), (512 << 10) + 3_000);
        assert_eq!(rig.counts(), (0, 1));
        drop(other);
        body.grow_beyond_body(600 << 10).unwrap();
        assert_eq!(rig.used(), 768 << 10);
        drop(body);
        assert_eq!(rig.used(), 0);
    }

    #[tokio::test]
    async fn a_request_that_can_read_its_history_again_waits_for_memory_a_few_times() {
        let rig = Rig::new(MIB, Duration::from_secs(60));
        let mut body = rig.read(1, 2_000).await.unwrap();
        // Without a relay it comes after all others.
        body.let_wait();
        assert_eq!(body.waits, 0);
        body.waits = 1;
        assert!(!body.wait_for_lacking().await.unwrap());
        let other = rig.read(2, 600 << 10).await.unwrap();
        assert!(body.grow_beyond_body(600 << 10).is_err());
        assert_eq!(rig.counts(), (0, 0));
        let waits = async { assert!(body.wait_for_lacking().await.unwrap()) };
        let end_other = async {
            while rig.counts().0 == 0 {
                tokio::task::yield_now().await;
            }
            drop(other);
        };
        tokio::join!(waits, end_other);
        assert_eq!(rig.used(), 768 << 10);
        body.grow_beyond_body(600 << 10).unwrap();
        // What it reads the second time is larger, and there is no memory for that.
        let small = rig.read(2, 1_000).await.unwrap();
        assert!(body.grow_beyond_body(900 << 10).is_err());
        assert!(!body.wait_for_lacking().await.unwrap());
        assert_eq!(rig.counts(), (1, 1));
        drop((body, small));
        assert_eq!(rig.used(), 0);
    }

    #[tokio::test]
    async fn what_fits_is_not_refused_because_of_the_last_step() {
        let rig = Rig::new(300 << 10, Duration::ZERO);
        let mut body = rig.read(1, 2_000).await.unwrap();
        body.grow_beyond_body(280 << 10).unwrap();
        assert_eq!(rig.used(), 300 << 10);
        drop(body);
        drop(rig.read(1, 290 << 10).await.unwrap());
        assert_eq!((rig.used(), rig.counts()), (0, (0, 0)));
    }

    #[tokio::test]
    async fn memory_that_is_kept_counts_until_it_is_dropped() {
        let rig = Rig::new(2 * MIB, Duration::ZERO);
        for bytes in [2_000, 200 << 10] {
            let mut body = rig.read(1, bytes).await.unwrap();
            let used = rig.used();
            let kept = body.try_keep().unwrap();
            drop(body);
            assert_eq!(rig.used(), used);
            drop(kept);
            assert_eq!(rig.used(), 0);
        }
        // One owner keeps half as much as its share, which is for its other bodies.
        let mut kept = Vec::new();
        for _ in 0..2 {
            kept.push(rig.read(1, 200 << 10).await.unwrap().try_keep().unwrap());
        }
        let mut third = rig.read(1, 200 << 10).await.unwrap();
        assert!(third.try_keep().is_none());
        assert_eq!((rig.used(), rig.counts()), (768 << 10, (0, 0)));
        assert!(rig.read(1, 200 << 10).await.is_ok());
        assert!(rig.read(2, 200 << 10).await.is_ok());
        kept.pop();
        assert!(third.try_keep().is_some());
    }

    #[tokio::test]
    async fn a_body_that_could_not_be_kept_is_known_before_it_waits() {
        let rig = Rig::new(2 * MIB, Duration::ZERO);
        let mut kept = Vec::new();
        for _ in 0..2 {
            kept.push(rig.read(1, 200 << 10).await.unwrap().try_keep().unwrap());
        }
        let _other = rig.read(2, 1_200 << 10).await.unwrap();
        let mut body = rig.read(1, 2_000).await.unwrap();
        assert!(body.may_keep_lacking());
        body.waits = 1;
        assert!(body.grow_beyond_body(200 << 10).is_err());
        assert!(!body.may_keep_lacking());
        // It has to wait for the body of the other, but could be kept then.
        kept.pop();
        assert!(body.may_keep_lacking());
    }

    #[tokio::test]
    async fn a_run_takes_memory_when_there_is_room_and_waits_for_none() {
        let rig = Rig::new(MIB, Duration::ZERO);
        let memory = &rig.budget.memory;
        let body = rig.read(1, 700 << 10).await.unwrap();
        assert!(memory.try_keep(ClientKey(2), 200 << 10).is_none());
        let mut small = memory.try_keep(ClientKey(2), 1_000).unwrap();
        assert!(small.try_renew(2_000) && !small.try_renew(300 << 10));
        assert_eq!(rig.used(), 768 << 10, "it has given back what it had");
        drop(body);
        assert!(small.try_renew(300 << 10) && small.try_renew(1_000));
        assert_eq!(rig.used(), 512 << 10);
        drop(small);
        // What is larger than all memory is not refused for ever.
        let large = memory.try_keep(ClientKey(2), 5 * MIB).unwrap();
        assert_eq!(rig.used(), MIB);
        drop(large);
        assert_eq!((rig.used(), rig.counts()), (0, (0, 0)));
    }

    #[tokio::test]
    async fn runs_of_one_owner_that_grow_do_not_wait_for_each_other() {
        let rig = Rig::new(4 * MIB, Duration::ZERO);
        let memory = &rig.budget.memory;
        // Both have a part of the half of a share, and need all of it.
        let run = || memory.try_keep(ClientKey(1), MIB / 2).unwrap();
        let (mut first, mut second) = (run(), run());
        assert!(!first.try_renew(MIB));
        assert!(second.try_renew(MIB));
        assert!(!first.try_renew(MIB));
        drop(second);
        assert!(first.try_renew(MIB));
        // One that is alone is not in its own way.
        assert!(first.try_renew(3 * MIB));
        assert_eq!(rig.used(), 3 * MIB);
    }

    #[tokio::test]
    async fn a_body_of_another_that_waits_stops_no_run() {
        let rig = Rig::new(MIB, Duration::from_secs(60));
        let memory = &rig.budget.memory;
        let large = rig.read(1, 400 << 10).await.unwrap();
        let waits = async { rig.read(1, 200 << 10).await.unwrap() };
        let run = async {
            while rig.counts().0 == 0 {
                tokio::task::yield_now().await;
            }
            assert!(memory.try_keep(ClientKey(2), 100 << 10).is_some());
            // Its own body comes first.
            assert!(memory.try_keep(ClientKey(1), 100).is_none());
            drop(large);
        };
        let (body, ()) = tokio::join!(waits, run);
        drop(body);
        assert_eq!((rig.used(), rig.counts()), (0, (1, 0)));
    }
}
