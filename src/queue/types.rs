//! What enters the queue, and how it leaves. This file imports nothing of its siblings.

use std::fmt;
use std::time::{Duration, Instant};

use crate::fleet::waiting::DueTime;
use crate::ids::ClientKey;

/// A request that would wait.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Higher is earlier; decides the class.
    pub priority: i32,
    /// Whose turn it takes within its class.
    pub client: ClientKey,
    /// Prompt tokens to compute, as far as they are known.
    pub tokens: u64,
    /// The time that a worker takes for them.
    pub compute: Duration,
    /// Bytes of its body as the engine gets it.
    pub bytes: u64,
    /// Memory of what its client sent, and of what that refers to: so many bytes are given back when its wait ends.
    pub client_bytes: u64,
    /// When its head was received.
    pub received: Instant,
    /// When it began to wait.
    pub entered: Instant,
    /// When it began to wait for what it waits for now: for a worker that takes requests, or for room.
    pub since: Instant,
    /// The longest time from `received` to the first token that is of use to the client.
    pub ttft_target: Option<Duration>,
    /// No client waits for it: it has no target, and all its time to wait.
    pub is_background: bool,
    /// When the time of the whole request is over.
    pub deadline: Instant,
    /// The worker that it has chosen has room: the next look says what becomes of it, whatever waits for others.
    pub has_room: bool,
    /// None of its model's workers takes more requests than a trial: it waits for one, whatever other models have.
    pub lacks_worker: bool,
    /// It has waited for a worker to come up. From then on its target gives it its turn, and is no reason to refuse it.
    pub has_lost_target: bool,
}

#[cfg(test)]
impl Request {
    /// That enters now, without a target, with so many tokens to compute.
    pub fn for_tests(now: Instant, tokens: u64) -> Self {
        Self {
            priority: 0,
            client: ClientKey(1),
            tokens,
            compute: Duration::ZERO,
            bytes: 10,
            client_bytes: 10,
            received: now,
            entered: now,
            since: now,
            ttft_target: None,
            is_background: false,
            deadline: now + Duration::from_secs(600),
            has_room: false,
            lacks_worker: false,
            has_lost_target: false,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EntryId(pub u64);

/// The workers of those who wait, as they are now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// Workers that could take a request. If there is none, those whose engines have asked for a pause.
    pub workers: u32,
    /// A hash of the workers whose computed tokens are counted, whatever their order. 0: none is counted.
    pub counted_workers: u64,
    /// None of them has room.
    pub is_full: bool,
    /// A worker beside them has room, which computes the prompts of some requests only: a decode worker.
    pub others_have_room: bool,
    /// Tokens that they have accepted and not computed yet.
    pub queued_tokens: u64,
    /// Prompt tokens that one of them computes in a second, as far as that was learnt; 0: nothing is known.
    pub rate: u64,
}

/// The times of a waiting request whose turn it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// What its target leaves of time until its first token.
    pub time_left: Option<Duration>,
    /// What is left of the time that it may wait: then it is refused.
    pub wait_left: Duration,
    pub due: DueTime,
}

/// What becomes of a waiting request whose turn it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// Its worker has room, and nobody before it waits for that one.
    Send,
    /// Its worker has room, but would make its first token so long from now, which is after its target.
    TooLate(Duration),
    /// It waits on for its worker.
    Wait,
    /// It waits on for the worker where it was seen to wait, without another look.
    PassOver,
    /// No worker has room for anybody.
    Full,
}

/// Which part of the order a walk over the waiting requests has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stretch {
    /// The first requests, with which each walk begins.
    First,
    /// Those behind the first ones, from the beginning.
    Behind,
    /// Those behind them, from where the last walk stopped.
    Resumed,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Outcome {
    /// A worker has room for it.
    Released,
    Refused(Refusal),
    /// Its model shares workers with others than before: it waits on in their queue.
    Moved,
}

/// What ends the wait for a worker to come.
pub(super) const NO_WORKER_TIMEOUT: &str = "queue.no_worker_timeout";
/// What ends each wait of a request, with its whole time.
pub(super) const REQUEST_TIMEOUT: &str = "requests.request_timeout";

/// Why a request does not wait, or no longer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Refusal {
    pub reason: RefusalReason,
    /// When another attempt may succeed.
    pub retry_after: Duration,
}

impl Refusal {
    /// The router is about to end; another replica takes the request.
    pub const DRAINING: Self = Self {
        reason: RefusalReason::Draining,
        retry_after: Duration::from_secs(1),
    };
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum RefusalReason {
    /// Its class has as many requests as it may have.
    #[error(
        "the workers are busy, and {max} requests of this priority wait already, of no client more than of this one \
         ({set_by}.max_requests)"
    )]
    TooManyRequests { max: u32, set_by: SetBy },
    /// The bodies of its class use as much memory as they may.
    #[error(
        "the workers are busy, and the waiting requests of this priority have {max} bytes already, of no client more \
         than of this one (queue.max_size)"
    )]
    TooManyBytes { max: u64 },
    /// A request of a higher class needs the memory of its body.
    #[error(
        "the workers are busy, and requests of a higher priority need the memory of this one's body \
         (api.max_total_body)"
    )]
    MemoryNeeded,
    /// It waited as long as a request may.
    #[error(
        "all workers stayed busy for the {:.1} s that a request may wait ({})",
        .waited.as_secs_f64(),
        .set_by.map_or(REQUEST_TIMEOUT.to_owned(), |set_by| format!("{set_by}.max_wait"))
    )]
    TimedOut {
        waited: Duration,
        /// `None`: the time of the whole request was over.
        set_by: Option<SetBy>,
    },
    /// It cannot meet its target; `expected` if it had waited.
    #[error(
        "all workers are busy: the first token is expected {:.1} s after the request, which does not safely meet \
         its target of {:.1} s",
        .expected.as_secs_f64(),
        .target.as_secs_f64()
    )]
    TargetUnreachable {
        target: Duration,
        expected: Duration,
    },
    /// No worker of the model came within the time.
    #[error(
        "no worker came up in the {:.1} s that a request may wait for one ({setting})",
        .waited.as_secs_f64()
    )]
    NoWorker {
        waited: Duration,
        /// The one that ended the wait.
        setting: &'static str,
    },
    /// The router is about to end.
    #[error("this router is about to end; try again")]
    Draining,
}

/// Whose setting refused a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SetBy {
    /// The setting of `queue`.
    Queue,
    /// The setting of a class, by its index in `queue.classes`.
    Class(usize),
}

impl SetBy {
    /// The setting of a class, or else that of the queue, with whose it is.
    pub(super) fn of<T>(own: Option<T>, class: usize, common: T) -> (T, Self) {
        match own {
            Some(own) => (own, Self::Class(class)),
            None => (common, Self::Queue),
        }
    }
}

impl fmt::Display for SetBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Queue => f.write_str("queue"),
            Self::Class(class) => write!(f, "queue.classes[{class}]"),
        }
    }
}

impl RefusalReason {
    /// The names in metrics, and of the error codes that clients get.
    pub const CODES: [&str; 5] = [
        "queue_full",
        "queue_timeout",
        "ttft_target_unreachable",
        "no_healthy_worker",
        "router_draining",
    ];

    pub fn code(self) -> &'static str {
        match self {
            Self::TooManyRequests { .. } | Self::TooManyBytes { .. } | Self::MemoryNeeded => {
                "queue_full"
            }
            Self::TimedOut { .. } => "queue_timeout",
            Self::TargetUnreachable { .. } => "ttft_target_unreachable",
            Self::NoWorker { .. } => "no_healthy_worker",
            Self::Draining => "router_draining",
        }
    }
}
