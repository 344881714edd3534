//! What this replica knows of one tenant's use: what is used of each limit, which requests run here, and what the
//! store has yet to be sent. Pure: the caller has the clock and the lock.

use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

use super::compiled::Limit;
use super::gcra;
use super::turns::Turns;
use crate::store::charges::{Charge, ChargeId, ChargeReply, Settlement};

/// Settlements that go along with charges: less than a millisecond of Redis' time.
const WITH_CHARGES: usize = 256;
/// Background responses that this replica remembers as charged when it counts alone.
const ONCE_MAX: usize = 1_024;

#[derive(Debug, Default)]
pub struct Use {
    /// By the name of the limit: when all of it may be used again, in microseconds of this process.
    full_at: SmallVec<[(Arc<str>, u64); 4]>,
    /// Requests that run here, and whether the store knows of them.
    running: FxHashSet<ChargeId>,
    /// Those of them that are lines of batches. No limit counts how many of these run.
    lines: usize,
    /// Over all replicas, as of the last answer of the store.
    running_everywhere: u64,
    /// Whether it has answered since that was last asked.
    has_answered: bool,
    /// Whether this replica has counted alone since the store last answered.
    pub is_apart: bool,
    pub unsettled: Vec<Settlement>,
    /// Whether it is known that something is unsettled, to whom settles what no charge takes along.
    is_noted: bool,
    /// Whether charges have taken settlements along since that was last asked.
    went_along: bool,
    /// Background responses that were charged here while the replica counted alone, and whether they were settled.
    charged_once: FxHashMap<ChargeId, bool>,
    /// Whose turn it is where only so many may run.
    pub(super) turns: Turns,
}

impl Use {
    /// What is used of a limit.
    pub fn of(&self, limit: &str, now: u64) -> u64 {
        let found = self.full_at.iter().find(|(name, _)| &**name == limit);
        found.map_or(0, |(_, full_at)| gcra::used(*full_at, now))
    }

    /// Without lines of batches.
    pub fn running_here(&self) -> usize {
        self.running.len().saturating_sub(self.lines)
    }

    pub fn running_everywhere(&self) -> u64 {
        self.running_everywhere.max(self.running_here() as u64)
    }

    /// Whether requests are believed to run elsewhere of which the store has said nothing since this was last asked: only it
    /// knows when those end.
    pub fn must_recount(&mut self) -> bool {
        let has_answered = std::mem::take(&mut self.has_answered);
        !has_answered && self.running_everywhere > self.running_here() as u64
    }

    /// So many run over all replicas.
    pub fn on_recount(&mut self, running: u64) {
        self.running_everywhere = running;
    }

    pub fn running(&self) -> Vec<ChargeId> {
        self.running.iter().copied().collect()
    }

    fn set(&mut self, limit: &Arc<str>, full_at: u64) {
        match self.full_at.iter_mut().find(|(name, _)| name == limit) {
            Some((_, known)) => *known = full_at,
            None => self.full_at.push((limit.clone(), full_at)),
        }
    }

    fn change(&mut self, limit: &Arc<str>, now: u64, micros: i64) {
        let known = self.full_at.iter().find(|(name, _)| name == limit);
        let full_at = known.map_or(0, |(_, full_at)| *full_at);
        let max_debt = gcra::max_debt(limit);
        self.set(limit, gcra::charged(full_at, now, micros, max_debt));
    }

    fn begin_run(&mut self, id: ChargeId) {
        let is_new = self.running.insert(id);
        if !id.is_line() {
            let running = self.running_here();
            self.turns.on_granted(id, running);
        } else if is_new {
            self.lines += 1;
        }
    }

    /// Charges that the store is to be asked for: says what is believed of their limits, and returns what it has yet to
    /// be sent.
    pub fn begin(&mut self, charges: &mut [Charge], now: u64) -> Vec<Settlement> {
        for limit in charges.iter_mut().flat_map(|charge| &mut charge.limits) {
            limit.believed = self.of(&limit.limit, now);
        }
        self.went_along |= !self.unsettled.is_empty();
        self.take_unsettled(WITH_CHARGES)
    }

    pub fn on_reply(&mut self, charge: &Charge, reply: &ChargeReply, now: u64) {
        for (limit, used) in charge.limits.iter().zip(&reply.used) {
            self.set(&limit.limit, now.saturating_add(*used));
        }
        self.running_everywhere = reply.running;
        self.has_answered = true;
        self.is_apart = false;
        if reply.is_granted {
            self.begin_run(charge.id);
        }
    }

    /// The store has not answered: what was to go along goes later. `withdrawn`: a charge that the store may have
    /// applied all the same.
    pub fn on_no_reply(&mut self, mut settlements: Vec<Settlement>, withdrawn: Option<Settlement>) {
        settlements.append(&mut self.unsettled);
        self.unsettled = settlements;
        self.unsettled.extend(withdrawn);
    }

    /// Decides alone, as one of `replicas` that each grant their share: every cost counts as that many, because the
    /// others are expected to have the same.
    pub fn decide_alone(
        &mut self,
        id: ChargeId,
        limits: &[(&Limit, u64)],
        max_concurrent: u32,
        replicas: u32,
        now: u64,
    ) -> ChargeReply {
        let replicas = replicas.max(1);
        // What counts in nothing says nothing of the store. Else the next charge would raise a limit there to what this
        // replica knew of it, without the corrections of the others since then.
        self.is_apart |= max_concurrent > 0 || !limits.is_empty();
        let running = self.running_here() as u64;
        let is_charged = self.charged_once.contains_key(&id);
        let has_room =
            max_concurrent == 0 || running < u64::from(max_concurrent.div_ceil(replicas));
        let share = |cost: u64| cost.saturating_mul(replicas.into());
        let fits = |(limit, cost): &(&Limit, u64)| {
            let burst = limit.rate.burst_micros;
            // A share may be smaller than one request.
            let cost = share(*cost).min(burst);
            gcra::wait(self.of(&limit.name, now), cost, burst).is_none()
        };
        let is_granted = has_room && (is_charged || limits.iter().all(fits));
        if is_granted {
            if !is_charged {
                for (limit, cost) in limits {
                    let cost = i64::try_from(share(*cost)).unwrap_or(i64::MAX);
                    self.change(&limit.name, now, cost);
                }
            }
            self.begin_run(id);
            if id.is_once() && !is_charged {
                if self.charged_once.len() >= ONCE_MAX {
                    self.charged_once.clear();
                }
                self.charged_once.insert(id, false);
            }
        }
        let used = limits.iter().map(|(limit, _)| self.of(&limit.name, now));
        ChargeReply {
            is_granted,
            running: running + u64::from(is_granted && !id.is_line()),
            used: used.collect(),
        }
    }

    /// A request has ended. `factor`: how many times its charge counted here; `for_store`: whether the store has to know.
    pub fn end(&mut self, settlement: Settlement, factor: u32, for_store: bool, now: u64) {
        let ran = self.running.remove(&settlement.id);
        // A response that ran again was charged once, so it is settled once, as in the store.
        let settle = |is_settled: &mut bool| std::mem::replace(is_settled, true);
        let charged = self.charged_once.get_mut(&settlement.id);
        let was_settled = !for_store && charged.is_some_and(settle);
        if settlement.is_refund && !was_settled {
            self.charged_once.remove(&settlement.id);
        }
        if settlement.id.is_line() {
            self.lines -= usize::from(ran);
        } else {
            self.running_everywhere = self.running_everywhere.saturating_sub(1);
        }
        let corrections = settlement.corrections.iter();
        for (limit, micros) in corrections.filter(|_| !was_settled) {
            self.change(limit, now, micros.saturating_mul(factor.into()));
        }
        if for_store {
            self.unsettled.push(settlement);
        }
    }

    /// Drops the oldest of more settlements than `max`. Returns how many.
    pub fn bound_unsettled(&mut self, max: usize) -> usize {
        let excess = self.unsettled.len().saturating_sub(max);
        self.unsettled.drain(..excess);
        excess
    }

    /// What the store has yet to be sent, at most so many.
    pub fn take_unsettled(&mut self, max: usize) -> Vec<Settlement> {
        if self.unsettled.len() <= max {
            // As many come until the next time.
            let next = Vec::with_capacity(self.unsettled.len());
            return std::mem::replace(&mut self.unsettled, next);
        }
        self.unsettled.drain(..max).collect()
    }

    /// True if something is unsettled and that was not known.
    pub fn note_unsettled(&mut self) -> bool {
        !self.unsettled.is_empty() && !std::mem::replace(&mut self.is_noted, true)
    }

    /// True if something is unsettled, though that may have been known: what knew it has ended with a panic.
    pub fn note_again(&mut self) -> bool {
        self.is_noted = !self.unsettled.is_empty();
        self.is_noted
    }

    /// Whether what is unsettled goes along with the next charges: some have taken what there was since this was last
    /// asked. If not, or if this is the last time, it is to be settled now.
    pub fn goes_along(&mut self, is_last: bool) -> bool {
        let went_along = std::mem::take(&mut self.went_along) && !is_last;
        let count = self.unsettled.len();
        let goes_along = went_along && (1..=WITH_CHARGES).contains(&count);
        self.is_noted = goes_along;
        goes_along
    }
}

#[cfg(test)]
mod tests;
