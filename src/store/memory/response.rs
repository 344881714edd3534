//! One response in the memory store: what it contains, its size, and what readers get of it.

use std::mem::size_of;
use std::time::Instant;

use bytes::Bytes;

use super::capacity::Cost;
use super::values::Values;
use crate::ids::{ResponseId, Root};
use crate::store::log::{Log, LogState};
use crate::store::record::{Background, InitialState, Retention};
use crate::store::{
    IdempotencyToken, LoggedEvents, NewRecord, Owner, Record, RetentionSettings, RoutingHint,
    Status,
};

/// Overhead of a record: map node (key, links), table entry (the table doubles when full), allocator.
/// `benches/store.rs` compares it with the growth of the process.
const OVERHEAD_BYTES: usize = size_of::<Response>() + 56 + 36 + 48;
/// Overhead of each short text: reference counts, allocator rounding.
const TEXT_BYTES: usize = 24;

#[derive(Debug)]
pub(super) struct Response {
    pub(super) token: IdempotencyToken,
    /// Tick of the last use (see `Capacity::tick`).
    pub(super) used: u64,
    pub(super) expires: Option<Instant>,
    pub(super) values: Values,
    pub(super) hint: RoutingHint,
    pub(super) parent: Option<ParentLink>,
    pub(super) run: Option<Box<Run>>,
    pub(super) status: Status,
}

/// The parent response. Its chain is in the same shard.
#[derive(Clone, Copy, Debug)]
pub(super) struct ParentLink {
    /// The own part of its id; the root is that of the child.
    own_id: [u64; 2],
    /// Number of turns before the child.
    pub(super) depth: u32,
    pub(super) bytes: u64,
}

impl ParentLink {
    pub(super) fn id(&self, root: Root) -> ResponseId {
        let own = u128::from(self.own_id[0]) << 64 | u128::from(self.own_id[1]);
        ResponseId::new(root, own)
    }
}

/// What only background responses have: the run, its event log and its end.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) owner: Option<Owner>,
    pub(super) fencing_number: u64,
    pub(super) attempts: u32,
    /// The fencing number whose run an engine began.
    pub(super) started: Option<u64>,
    pub(super) lost_owners: u32,
    pub(super) retention: Retention,
    pub(super) streams: bool,
    pub(super) request: Bytes,
    pub(super) log: Log,
    /// When the log expires.
    pub(super) log_until: Option<Instant>,
    pub(super) delta_table: Bytes,
    pub(super) end_token: Option<IdempotencyToken>,
    pub(super) status_before_cancel: Option<Status>,
    pub(super) has_partial_output: bool,
    /// Whether it was cancelled and the output that readers received is still to be stored.
    pub(super) has_output_pending: bool,
}

impl Response {
    pub(super) fn new(now: Instant, record: NewRecord, keep: &RetentionSettings) -> Self {
        let (status, run) = match record.initial {
            InitialState::Finished { status } => (status, None),
            InitialState::Background {
                fence,
                retention,
                streams,
                request,
            } => {
                let run = Run {
                    owner: Some(fence.owner),
                    fencing_number: fence.number,
                    attempts: 1,
                    started: None,
                    lost_owners: 0,
                    retention,
                    streams,
                    request: Bytes::copy_from_slice(&request),
                    log: Log::default(),
                    log_until: None,
                    delta_table: Bytes::new(),
                    end_token: None,
                    status_before_cancel: None,
                    has_partial_output: false,
                    has_output_pending: false,
                };
                (Status::Queued, Some(Box::new(run)))
            }
        };
        let parent = record.parent.and_then(|chain| {
            let own = chain.ids.last()?.own();
            Some(ParentLink {
                own_id: [(own >> 64) as u64, own as u64],
                depth: chain.ids.len() as u32,
                bytes: chain.bytes,
            })
        });
        let expires = match run {
            Some(_) => None,
            None => keep.of_responses().map(|ttl| now + ttl),
        };
        Self {
            token: record.token,
            used: 0,
            expires,
            values: Values::new(&record.input, &record.content),
            hint: record.hint,
            parent,
            run,
            status,
        }
    }

    pub(super) fn is_ephemeral(&self) -> bool {
        let retention = self.run.as_ref().map(|run| run.retention);
        retention == Some(Retention::Ephemeral)
    }

    pub(super) fn cost(&self) -> Cost {
        let texts = self.hint.model.len() + self.hint.worker.as_deref().map_or(0, str::len);
        let run = self.run.as_ref().map_or(0, |run| {
            size_of::<Run>()
                + run.request.len()
                + run.delta_table.len()
                + run.log.cost() as usize
                + 64
        });
        Cost {
            bytes: (OVERHEAD_BYTES + self.values.len() + texts + 2 * TEXT_BYTES + run) as u64,
            runs: !self.status.is_terminal(),
        }
    }

    pub(super) fn record(&self, root: Root) -> Record {
        Record {
            status: self.status,
            hint: self.hint.clone(),
            previous: self.parent.map(|parent| parent.id(root)),
            content: self.values.content(),
            background: self.run.as_ref().map(|run| Background {
                owner: run.owner,
                fencing_number: run.fencing_number,
                attempts: run.attempts,
                retention: run.retention,
                streams: run.streams,
                last_event: run.log.last,
            }),
        }
    }

    /// The previous status and owner, if a cancel with this token ended it.
    pub(super) fn cancelled_by(&self, token: IdempotencyToken) -> Option<(Status, Option<Owner>)> {
        let run = self.run.as_ref()?;
        let was = run
            .status_before_cancel
            .filter(|_| run.end_token == Some(token))?;
        Some((was, run.owner))
    }

    pub(super) fn owner(&self) -> Option<Owner> {
        if self.status.is_terminal() {
            None
        } else {
            self.run.as_ref()?.owner
        }
    }

    pub(super) fn events(
        &self,
        now: Instant,
        after: Option<u64>,
        bytes_max: u64,
    ) -> Option<LoggedEvents> {
        let run = self.run.as_ref()?;
        let has_expired = run.log_until.is_some_and(|until| until <= now);
        let has_expired = has_expired && run.log.last.is_some();
        let log = if run.log.follows(after) && !has_expired {
            LogState::Whole
        } else if self.status.is_terminal() && !run.delta_table.is_empty() {
            LogState::Expired(run.delta_table.clone())
        } else {
            LogState::Overflowed
        };
        let batches = match log {
            LogState::Whole => run.log.read(after, bytes_max),
            LogState::Expired(_) | LogState::Overflowed => Vec::new(),
        };
        Some(LoggedEvents {
            status: self.status,
            fencing_number: run.fencing_number,
            batches,
            last: run.log.last,
            log,
        })
    }

    pub(super) fn has_output_pending(&self) -> bool {
        self.run.as_ref().is_some_and(|run| run.has_output_pending)
    }

    pub(super) fn request(&self) -> Option<Bytes> {
        let request = self.run.as_ref().map(|run| run.request.clone());
        request.filter(|_| !self.status.is_terminal() || self.has_output_pending())
    }

    /// Owner and fencing number, if the response has work left and its owner is not alive.
    pub(super) fn orphan(
        &self,
        is_alive: impl FnOnce(Owner) -> bool,
    ) -> Option<(Option<Owner>, u64)> {
        let run = self.run.as_ref()?;
        let is_unfinished = !self.status.is_terminal() || run.has_output_pending;
        (is_unfinished && !run.owner.is_some_and(is_alive))
            .then_some((run.owner, run.fencing_number))
    }
}
