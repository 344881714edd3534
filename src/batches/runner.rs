//! The works of batches on this replica: finds what is to be done, claims it, and does it on the I/O threads.
//!
//! ```text
//! look ─▶ documents that are due ─▶ claim (compare-and-set) ─▶ validating | shard_run | assembling | deleting
//! watch ─▶ records of what runs here ─▶ renewed claims; works that are cancelled, expired or lost are stopped
//! sweep ─▶ files that have expired
//! trial ─▶ whether the storage can be used, and is the one that all replicas share; else claims run out, so that other
//!           replicas have the works, as they do if this replica's clock is wrong
//! ```

mod assembling;
mod deleting;
mod input_lines;
mod line_run;
mod lines_of_pieces;
mod look_pace;
mod object_lines;
mod off_thread;
mod part_buffer;
mod retry;
mod shard_run;
mod validating;
mod work_context;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::sleep;

use self::look_pace::{LookPace, MAX_DUE};
use self::work_context::WorkContext;
use super::batch::{BatchRecord, Work};
use super::metrics::WorkOutcome;
use super::records::record_of;
use super::room_gate::RoomGate;
use super::send::SendLine;
use super::service::Batches;
use super::turns::{Turn, TurnClass};
use super::works::StopWork;
use crate::observe;
use crate::store;
use crate::store::documents::{Collection, Document, DocumentKey, ReplaceOutcome};

/// Time between two looks at the records of what runs here, within which a cancel on another replica is seen.
const WATCH_INTERVAL: Duration = Duration::from_millis(500);

/// Renewals within a lease: one may be late.
const RENEWALS: u32 = 3;

/// Batches among which the next shard is chosen: more than one tenant may have, so that no tenant's batches hide those
/// of another from their turn.
const MAX_TURNS: usize = 1_024;

/// Time between two looks for files that have expired.
const SWEEP_INTERVAL: Duration = Duration::from_secs(60);

/// A batch that is written while a look for work begins is due from that moment on, a little after the time of the look. Were
/// it not seen, another one would get its turn.
const WRITTEN_MEANWHILE_MS: u64 = 100;

/// How often a claim is made anew because others have written.
const MAX_CLAIM_ROUNDS: u32 = 5;

impl Batches {
    /// Starts the works on the I/O threads. They end when the drain begins.
    pub fn start(self: &Arc<Self>, sender: Arc<dyn SendLine>) {
        let runner = Runner {
            batches: self.clone(),
            gate: Arc::new(RoomGate::new(self.metrics.lines_waiting.clone())),
            sender,
        };
        let running = self.tasks.track_until_stopped(runner.run());
        self.io_threads.spawn(running);
    }
}

/// Finds works and starts them.
struct Runner {
    batches: Arc<Batches>,
    sender: Arc<dyn SendLine>,
    gate: Arc<RoomGate>,
}

impl Runner {
    async fn run(self) {
        tokio::join!(
            self.supervised(|| self.gate.run(&*self.sender)),
            self.supervised(|| self.look_for_work()),
            self.supervised(|| self.watch_works()),
            self.supervised(|| self.sweep()),
            self.supervised(|| self.try_storage()),
        );
    }

    /// Runs a part, and begins it again after a panic without the others: a batch that makes each look for work panic must not
    /// keep the claims of what runs from being renewed.
    async fn supervised<F: Future<Output = ()>>(&self, begin: impl Fn() -> F) {
        let supervisor = self.batches.tasks.supervisor();
        while supervisor.attempt("batches", begin()).await.is_none() {}
    }

    async fn look_for_work(&self) {
        let works = &self.batches.works;
        let mut pace = LookPace::new(observe::now());
        let mut is_woken = true;
        loop {
            let now = observe::now();
            let looked = if !is_woken && pace.goes_on_behind(now) {
                self.look_on(&mut pace.behind).await
            } else {
                pace.on_look_at_first(now);
                self.look(&mut pace).await
            };
            if let Err(error) = looked {
                self.batches
                    .failed("batches could not be looked for", &error);
            }
            let interval = pace.interval(works.batches().is_empty());
            is_woken = tokio::select! {
                () = sleep(interval) => false,
                () = works.wake.notified() => true,
            };
        }
    }

    /// Whether this replica may look for works.
    async fn may_look(&self) -> Result<bool, store::Error> {
        // The clock is compared whatever the storage is like: creations need both.
        let is_clock_right = self.batches.checked_ms().await?.is_some();
        Ok(is_clock_right && self.batches.is_storage_usable())
    }

    /// Starts what there is room for.
    async fn look(&self, pace: &mut LookPace) -> Result<(), store::Error> {
        if !self.may_look().await? {
            return Ok(());
        }
        while self.batches.works.has_any_room() {
            let due = self.first_due(pace).await?;
            let first = due.len();
            match self.take_one(due).await? {
                // That was all there was.
                Taken::Started { is_due: false } if first == 1 => {}
                Taken::Started { .. } => continue,
                Taken::Nothing => {}
            }
            if first < MAX_DUE {
                // These were all.
                pace.behind = 0;
                break;
            }
            // The first may all wait for a shard's turn. Behind them are batches that have expired meanwhile, or whose
            // replica is gone: each look sees some of them.
            pace.behind = first.max(pace.behind);
            self.take_behind(&mut pace.behind).await?;
            break;
        }
        Ok(())
    }

    /// Goes on behind the first batches without another look at these.
    async fn look_on(&self, behind: &mut usize) -> Result<(), store::Error> {
        if self.may_look().await? && self.batches.works.has_any_room() {
            self.take_behind(behind).await?;
        }
        Ok(())
    }

    /// Does what the batches from this place on need next. The place is that behind them then, or 0 if these were all.
    async fn take_behind(&self, behind: &mut usize) -> Result<(), store::Error> {
        let others = self.due(*behind, MAX_DUE).await?;
        let found = others.len();
        *behind = if found == 0 { 0 } else { *behind + found };
        for (_, document) in others {
            self.take(document).await?;
        }
        Ok(())
    }

    /// The batches that are due first, in the order of their turns.
    async fn first_due(&self, pace: &mut LookPace) -> Result<Vec<(Turn, Document)>, store::Error> {
        let has_room = self.batches.works.has_room(Work::Shard(0));
        let max = if has_room { MAX_TURNS } else { MAX_DUE };
        let due = self.due(0, max).await?;
        pace.on_first(due.iter().filter(|(turn, _)| turn.is_left).count());
        Ok(due)
    }

    /// The batches from this place on of those that are due, in the order of their turns: `max` or a few more if there
    /// are as many, and up to [`MAX_TURNS`] while others than shards are among them.
    async fn due(&self, from: usize, max: usize) -> Result<Vec<(Turn, Document)>, store::Error> {
        let Batches { store, .. } = &*self.batches;
        let now_ms = self.batches.now_ms();
        let until_ms = now_ms + WRITTEN_MEANWHILE_MS;
        let mut due = Vec::new();
        loop {
            let start = from + due.len();
            let places = start..start + MAX_DUE;
            let found = store.due_documents(Collection::Batches, until_ms, places);
            let page = found.await?;
            // A page may be shorter than it could be: it has a bound of bytes, and leaves out what cannot be read.
            if page.is_empty() {
                break;
            }
            let with_turn = |document: Document| (self.turn(&document, now_ms), document);
            due.extend(page.into_iter().map(with_turn));
            // Works other than shards are due before all shards. All are seen, so that no tenant's hide those of another.
            let may_hide = due
                .last()
                .is_some_and(|(turn, _)| turn.class != TurnClass::Shard);
            if due.len() >= if may_hide { MAX_TURNS } else { max } {
                break;
            }
        }
        // Equal ones stay in the order of their due times.
        due.sort_by_key(|(turn, _)| *turn);
        Ok(due)
    }

    fn turn(&self, document: &Document, now_ms: u64) -> Turn {
        let record = record_of(document).ok();
        let next_work = |record: &BatchRecord| record.next_work(now_ms, Some(self.batches.owner));
        let work = record.as_ref().and_then(next_work);
        let is_left = record.zip(work).is_some_and(|(record, work)| {
            self.is_left_to_others(&document.key, &record, work, now_ms)
        });
        let works = &self.batches.works;
        Turn {
            is_left,
            ..works.turn(observe::now(), &document.key, work)
        }
    }

    /// Starts the first work that there is room for. Whose turn is next depends on what runs.
    async fn take_one(&self, due: Vec<(Turn, Document)>) -> Result<Taken, store::Error> {
        for (_, document) in due {
            let taken = self.take(document).await?;
            if taken != Taken::Nothing {
                return Ok(taken);
            }
        }
        Ok(Taken::Nothing)
    }

    /// Does what a batch needs next, if this replica can.
    async fn take(&self, mut document: Document) -> Result<Taken, store::Error> {
        let Batches { store, works, .. } = &*self.batches;
        let owner = self.batches.owner;
        for _ in 0..MAX_CLAIM_ROUNDS {
            let record = match record_of(&document) {
                Ok(record) => record,
                Err(error) => {
                    // A newer release knows what to do with it.
                    self.batches
                        .failed("a batch is left to other replicas", &error);
                    return Ok(Taken::Nothing);
                }
            };
            let key = document.key.clone();
            let now_ms = self.batches.now_ms();
            if record.is_webhook_due(now_ms) {
                self.batches.settle_end(&key, &record).await;
                return Ok(Taken::Nothing);
            }
            if record.are_parts_due(now_ms) {
                self.batches.delete_parts(key);
                return Ok(Taken::Nothing);
            }
            let is_left = |work: Work| self.is_left_to_others(&key, &record, work, now_ms);
            let may_begin = |work: Work| works.has_room(work) && !is_left(work);
            // A claim whose write was not confirmed.
            if let Some(work) = self.unknown_claim(&key, &record) {
                let is_started = may_begin(work) && self.begin(&key, work);
                return Ok(Taken::of(is_started, &record, now_ms));
            }
            let mut claimed = record.clone();
            let work = claimed.claim(now_ms, owner, self.lease_ms());
            match work {
                Some(work) if !may_begin(work) => {
                    if !is_left(work) {
                        works.on_no_room(observe::now(), &key, work);
                    }
                    return Ok(Taken::Nothing);
                }
                Some(_) => {}
                // It is due for nothing: by when it was written, something else would have happened by now.
                None if is_due(&record, now_ms + WRITTEN_MEANWHILE_MS) => {
                    return Ok(Taken::Nothing);
                }
                None => {}
            }
            let records = &self.batches.records;
            let written = records.write(&key, document.version, &claimed, now_ms);
            match written.await? {
                ReplaceOutcome::Done(_) => {
                    let is_started = work.is_some_and(|work| self.begin(&key, work));
                    return Ok(Taken::of(is_started, &claimed, now_ms));
                }
                ReplaceOutcome::Gone => return Ok(Taken::Nothing),
                ReplaceOutcome::Changed => match store.document(key).await? {
                    Some(changed) => document = changed,
                    None => return Ok(Taken::Nothing),
                },
            }
        }
        Ok(Taken::Nothing)
    }

    /// Whether a work needs the tenant of its batch, and this replica does not know it, or has refused a model of it:
    /// others may have read a newer configuration already. A batch whose time is over needs neither, and ends here as
    /// well.
    fn is_left_to_others(
        &self,
        key: &DocumentKey,
        record: &BatchRecord,
        work: Work,
        now_ms: u64,
    ) -> bool {
        if work == Work::Validate && self.batches.works.leaves_validation(now_ms, key) {
            return true;
        }
        let needs_tenant = match work {
            Work::Validate | Work::Shard(_) => now_ms < record.expires_ms,
            Work::Finalize | Work::Delete => false,
        };
        needs_tenant && !self.sender.knows_tenant(&record.tenant_name)
    }

    /// A work that the record says is this replica's, and that nothing here does.
    fn unknown_claim(&self, key: &DocumentKey, record: &BatchRecord) -> Option<Work> {
        let owner = self.batches.owner;
        let claims = record.claims.iter().filter(|claim| claim.owner == owner);
        let mut works = claims.map(|claim| claim.work);
        works.find(|work| !self.batches.works.runs(key, *work))
    }

    /// Starts a work that was claimed. False if it runs already.
    fn begin(&self, key: &DocumentKey, work: Work) -> bool {
        let Some(guard) = self.batches.works.begin(key, work) else {
            return false;
        };
        let context = WorkContext {
            batches: self.batches.clone(),
            sender: self.sender.clone(),
            gate: self.gate.clone(),
            guard,
        };
        let running = self.batches.tasks.track(run_work(context));
        self.batches.io_threads.spawn(running);
        true
    }

    fn lease_ms(&self) -> u64 {
        u64::try_from(self.batches.lease.as_millis()).unwrap_or(u64::MAX)
    }

    /// Stops works that are to stop, and renews the claims of the others.
    async fn watch_works(&self) {
        let mut renewed: BTreeMap<DocumentKey, Instant> = BTreeMap::new();
        let renewal_interval = self.batches.lease / RENEWALS;
        loop {
            sleep(WATCH_INTERVAL).await;
            let running = self.batches.works.batches();
            renewed.retain(|key, _| running.contains(key));
            self.batches.running.lock().keep(&running);
            for key in running {
                let now = observe::now();
                let at = *renewed.entry(key.clone()).or_insert(now);
                let is_due = now.saturating_duration_since(at) >= renewal_interval;
                match self.watch(&key, is_due).await {
                    Ok(()) if is_due => {
                        renewed.insert(key, now);
                    }
                    Ok(()) => {}
                    // What runs goes on: its results are right whoever has the claim.
                    Err(error) => self.batches.failed("record of a batch not read", &error),
                }
            }
        }
    }

    async fn watch(&self, key: &DocumentKey, renews: bool) -> Result<(), store::Error> {
        let Batches { records, works, .. } = &*self.batches;
        let owner = self.batches.owner;
        let begun = works.of_batch(key);
        let Some((record, _)) = records.read(key).await? else {
            works.stop(key, |_| Some(StopWork::Lost));
            return Ok(());
        };
        self.batches.running.lock().set(key, &record);
        let is_stopping = record.is_stopping(self.batches.now_ms());
        works.stop(key, |work| {
            if !record.owns(owner, work) {
                // A record that was read before a work was claimed says nothing of it.
                return begun.contains(&work).then_some(StopWork::Lost);
            }
            StopWork::of_stopping_batch(work).filter(|_| is_stopping)
        });
        // The works of a replica that may begin none are left to others.
        let may_renew = self.batches.is_storage_usable() && self.batches.files.clock.is_right();
        if renews && may_renew {
            let lease_ms = self.lease_ms();
            let renewed =
                records.change(key, |record, now_ms| record.renew(now_ms, owner, lease_ms));
            renewed.await?;
        }
        Ok(())
    }

    /// Deletes files that have expired.
    async fn sweep(&self) {
        loop {
            self.delete_expired().await;
            sleep(SWEEP_INTERVAL).await;
        }
    }

    async fn delete_expired(&self) {
        // The records would go, and the bytes stay in the other storage. The trial says why it is another one.
        if self.batches.ask_storage().await.is_err() {
            return;
        }
        let deleted = async {
            if let Some(now_ms) = self.batches.checked_ms().await? {
                self.batches.files.delete_expired(now_ms).await?;
            }
            Ok::<(), store::Error>(())
        };
        if let Err(error) = deleted.await {
            self.batches.failed("expired files not deleted", &error);
        }
    }

    async fn try_storage(&self) {
        loop {
            let is_usable = self.batches.try_storage().await;
            tokio::select! {
                () = sleep(self.batches.trial_interval(is_usable)) => {}
                () = self.batches.trial_due.notified() => {}
            }
        }
    }
}

/// What came of a look at a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Taken {
    /// No work was started.
    Nothing,
    /// A work was started. `is_due`: the batch has more to do now.
    Started { is_due: bool },
}

impl Taken {
    fn of(is_started: bool, record: &BatchRecord, now_ms: u64) -> Self {
        if is_started {
            let is_due = is_due(record, now_ms);
            Self::Started { is_due }
        } else {
            Self::Nothing
        }
    }
}

/// Whether some replica has something to do for a batch now.
fn is_due(record: &BatchRecord, now_ms: u64) -> bool {
    record.due_ms(now_ms).is_some_and(|at| at <= now_ms)
}

async fn run_work(context: WorkContext) {
    let outcome = match context.work() {
        Work::Validate => validating::run(&context).await,
        Work::Shard(number) => shard_run::run(&context, number).await,
        Work::Finalize => assembling::run(&context).await,
        Work::Delete => deleting::run(&context).await,
    };
    if outcome == WorkOutcome::Done {
        context.batches.works.on_done(context.key());
    }
    context.batches.metrics.on_work(context.work(), outcome);
}

#[cfg(test)]
mod tests;
