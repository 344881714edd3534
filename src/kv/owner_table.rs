//! Which workers own which blocks, each with a number whose meaning is the user's.
//!
//! A table of a million blocks lies in no cache of a core, so adding or removing a block waits for memory. Prompts have
//! many blocks, and their entries can be asked for ahead ([`OwnerTable::prefetch`]), which overlaps the waits. Entries
//! are short for the same reason: most blocks have one owner, which lies in the entry itself.

use std::hash::{BuildHasher, RandomState};

use parking_lot::RwLock;

use super::prefetch::prefetch;
use crate::ids::{BlockHash, WorkerId};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owner {
    pub(super) worker: WorkerId,
    /// Less than [`NONE`].
    pub(super) value: u32,
}

/// No value of an owner.
const NONE: u32 = u32::MAX;

const MIN_ENTRIES: usize = 8;
/// A shard's table of no more entries than this is kept whatever goes: it takes 4 KiB.
const KEPT_ENTRIES: usize = 256;
const MAX_SHARD_BITS: u32 = 10;

#[derive(Debug)]
pub(super) struct OwnerTable {
    /// Parts with a lock each. Their number is a power of two.
    shards: Box<[Shard]>,
    spread: Spread,
}

/// Makes hashes of paths. Those are spread over 64 bits already, but a client can compute them, and choose prompts whose
/// blocks would all have one home. So each table has a random odd factor of its own. The first bits of a hash choose the
/// shard, and those after the first ten the entry.
#[derive(Clone, Copy, Debug)]
struct Spread(u64);

impl Spread {
    fn random() -> Self {
        Self(RandomState::new().hash_one(0_u64) | 1)
    }

    #[inline]
    fn hash(self, path: u64) -> u64 {
        path.wrapping_mul(self.0)
    }
}

/// Two neighbours share no cache line.
#[derive(Debug)]
#[repr(align(128))]
struct Shard(RwLock<Entries>);

/// A hash table with linear probing.
#[derive(Debug)]
struct Entries {
    /// Their number is a power of two.
    entries: Vec<Entry>,
    len: usize,
    /// The table's.
    spread: Spread,
    /// The owners of blocks with several, sorted, by number.
    shared: Vec<Vec<Owner>>,
    /// Free numbers in `shared`.
    free: Vec<u32>,
    /// [`KEPT_ENTRIES`]; tests have fewer.
    kept_entries: usize,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    path: u64,
    owner: Owner,
}

/// No block.
const FREE: Entry = Entry {
    path: 0,
    owner: Owner {
        worker: WorkerId(0),
        value: NONE,
    },
};

/// Stands for several owners; the value is then their number in `shared`.
const SEVERAL: WorkerId = WorkerId(u32::MAX);

impl OwnerTable {
    /// `shards` is a power of two from 2 to 1,024.
    pub(super) fn new(shards: usize) -> Self {
        Self::with_spread(shards, Spread::random())
    }

    fn with_spread(shards: usize, spread: Spread) -> Self {
        Self::keeping(shards, spread, KEPT_ENTRIES)
    }

    fn keeping(shards: usize, spread: Spread, kept_entries: usize) -> Self {
        let is_right = shards.is_power_of_two() && (2..=1 << MAX_SHARD_BITS).contains(&shards);
        assert!(is_right, "{shards} shards");
        let entries = || Entries::new(spread, kept_entries);
        let shards = (0..shards).map(|_| Shard(RwLock::new(entries())));
        Self {
            shards: shards.collect(),
            spread,
        }
    }

    /// Asks for the cache lines of a block's entry ahead of its use. Four entries fill a line, and few searches end more
    /// than two entries after their home.
    #[inline]
    pub(super) fn prefetch(&self, path: BlockHash) {
        let hash = self.spread.hash(path.0);
        // While another thread writes, waiting for it would cost more.
        if let Some(shard) = self.shard(hash).try_read() {
            let (home, mask) = (shard.home(hash), shard.entries.len() - 1);
            prefetch(&shard.entries[home]);
            prefetch(&shard.entries[(home + 2) & mask]);
        }
    }

    /// Looks at a block's owners, sorted by worker.
    #[inline]
    pub(super) fn read<R>(&self, path: BlockHash, look: impl FnOnce(&[Owner]) -> R) -> R {
        let hash = self.spread.hash(path.0);
        let shard = self.shard(hash).read();
        match shard.find(hash, path.0) {
            Ok(at) => look(shard.owners(&shard.entries[at].owner)),
            Err(_) => look(&[]),
        }
    }

    #[inline]
    pub(super) fn value(&self, worker: WorkerId, path: BlockHash) -> Option<u32> {
        self.read(path, |owners| {
            position_of(owners, worker)
                .ok()
                .map(|position| owners[position].value)
        })
    }

    /// Adds an owner. `value` is asked for only if the worker does not own the block; otherwise `None`.
    #[inline]
    pub(super) fn insert(
        &self,
        worker: WorkerId,
        path: BlockHash,
        value: impl FnOnce() -> u32,
    ) -> Option<u32> {
        let mut inserted = None;
        self.update(worker, path, |known| {
            known.or_else(|| {
                inserted = Some(value());
                inserted
            })
        });
        inserted
    }

    /// Changes the value of a worker. `change` is given the value, `None` if the worker does not own the block, and returns
    /// the new one, `None` to remove the worker.
    #[inline]
    pub(super) fn update(
        &self,
        worker: WorkerId,
        path: BlockHash,
        change: impl FnOnce(Option<u32>) -> Option<u32>,
    ) {
        let hash = self.spread.hash(path.0);
        self.shard(hash)
            .write()
            .update(hash, path.0, worker, change);
    }

    #[inline]
    pub(super) fn remove(&self, worker: WorkerId, path: BlockHash) {
        self.update(worker, path, |_| None);
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.shards.iter().all(|shard| shard.0.read().len == 0)
    }

    #[inline]
    fn shard(&self, hash: u64) -> &RwLock<Entries> {
        &self.shards[(hash >> (u64::BITS - self.shards.len().ilog2())) as usize].0
    }
}

impl Entries {
    fn new(spread: Spread, kept_entries: usize) -> Self {
        Self {
            entries: vec![FREE; MIN_ENTRIES],
            len: 0,
            spread,
            shared: Vec::new(),
            free: Vec::new(),
            kept_entries,
        }
    }

    #[inline]
    fn home(&self, hash: u64) -> usize {
        // The first bits choose the shard.
        let bits = self.entries.len().ilog2();
        ((hash << MAX_SHARD_BITS) >> (u64::BITS - bits)) as usize
    }

    /// Where the block's entry is, or would be.
    #[inline]
    fn find(&self, hash: u64, path: u64) -> Result<usize, usize> {
        let mask = self.entries.len() - 1;
        let mut at = self.home(hash);
        loop {
            let entry = &self.entries[at];
            if entry.owner.value == NONE {
                return Err(at);
            }
            if entry.path == path {
                return Ok(at);
            }
            at = (at + 1) & mask;
        }
    }

    #[inline]
    fn owners<'a>(&'a self, owner: &'a Owner) -> &'a [Owner] {
        match owner.worker {
            SEVERAL => &self.shared[owner.value as usize],
            _ => std::slice::from_ref(owner),
        }
    }

    fn update(
        &mut self,
        hash: u64,
        path: u64,
        worker: WorkerId,
        change: impl FnOnce(Option<u32>) -> Option<u32>,
    ) {
        let at = match self.find(hash, path) {
            Ok(at) => at,
            Err(free) => {
                if let Some(value) = change(None) {
                    self.insert_first(free, hash, path, Owner { worker, value });
                }
                return;
            }
        };
        let owners = match &mut self.entries[at].owner {
            Owner {
                worker: SEVERAL,
                value: number,
            } => &mut self.shared[*number as usize][..],
            owner => std::slice::from_mut(owner),
        };
        let position = position_of(owners, worker);
        let known = position.ok().map(|position| owners[position].value);
        match (change(known), position) {
            (Some(value), Ok(position)) => owners[position].value = value,
            (Some(value), Err(position)) => {
                self.insert_further(at, position, Owner { worker, value });
            }
            (None, Ok(_)) => self.remove_owner(at, worker),
            (None, Err(_)) => {}
        }
    }

    /// Adds the first owner of a block, whose entry would be at `free`.
    #[inline]
    fn insert_first(&mut self, free: usize, hash: u64, path: u64, owner: Owner) {
        let mut at = free;
        // Probes stay short up to this share.
        if self.len + 1 > self.entries.len() / 8 * 5 {
            self.grow();
            at = self.find(hash, path).unwrap_or_else(|free| free);
        }
        self.entries[at] = Entry { path, owner };
        self.len += 1;
    }

    /// Adds an owner of a block that has others, at its place among them.
    fn insert_further(&mut self, at: usize, position: usize, owner: Owner) {
        let first = self.entries[at].owner;
        let number = match first.worker {
            SEVERAL => first.value,
            _ => {
                let number = self.free.pop().unwrap_or_else(|| {
                    self.shared.push(Vec::new());
                    self.shared.len() as u32 - 1
                });
                self.shared[number as usize].push(first);
                self.entries[at].owner = Owner {
                    worker: SEVERAL,
                    value: number,
                };
                number
            }
        };
        self.shared[number as usize].insert(position, owner);
    }

    fn remove_owner(&mut self, at: usize, worker: WorkerId) {
        match self.entries[at].owner {
            Owner {
                worker: SEVERAL,
                value: number,
            } => {
                let owners = &mut self.shared[number as usize];
                if let Ok(position) = position_of(owners, worker) {
                    owners.remove(position);
                }
                if let [last] = owners[..] {
                    *owners = Vec::new();
                    self.free.push(number);
                    self.entries[at].owner = last;
                    self.give_lists_back();
                }
            }
            owner if owner.worker == worker => self.remove_entry(at),
            _ => {}
        }
    }

    /// Removes an entry and moves those after it, so that no search ends before them.
    fn remove_entry(&mut self, at: usize) {
        let mask = self.entries.len() - 1;
        let (mut hole, mut next) = (at, (at + 1) & mask);
        while self.entries[next].owner.value != NONE {
            let home = self.home(self.spread.hash(self.entries[next].path));
            let from_home = next.wrapping_sub(home) & mask;
            let from_hole = next.wrapping_sub(hole) & mask;
            if from_home >= from_hole {
                self.entries[hole] = self.entries[next];
                hole = next;
            }
            next = (next + 1) & mask;
        }
        self.entries[hole] = FREE;
        self.len -= 1;
        // The smaller table is at most a quarter full: half of its blocks must go, or as many come, before it changes
        // again.
        if self.entries.len() > self.kept_entries && self.len < self.entries.len() / 8 {
            self.shrink();
        }
    }

    #[cold]
    fn grow(&mut self) {
        self.resize(self.entries.len() * 2);
    }

    /// Gives memory back when workers have left or have restarted.
    #[cold]
    fn shrink(&mut self) {
        self.resize(self.entries.len() / 2);
        self.renumber();
    }

    /// Gives the memory of lists back when most blocks that had several owners have one. A table that has few lists for
    /// its entries keeps them: numbering lists anew looks at each entry, and must not happen often.
    fn give_lists_back(&mut self) {
        let are_many = self.shared.len() > self.entries.len().max(self.kept_entries) / 8;
        if are_many && self.free.len() > self.shared.len() / 4 * 3 {
            self.renumber();
        }
    }

    /// Gives the lists of owners new numbers, so that none is free.
    #[cold]
    fn renumber(&mut self) {
        let mut shared = Vec::new();
        for entry in &mut self.entries {
            if entry.owner.worker == SEVERAL {
                let number = entry.owner.value as usize;
                entry.owner.value = shared.len() as u32;
                shared.push(std::mem::take(&mut self.shared[number]));
            }
        }
        self.shared = shared;
        self.free = Vec::new();
    }

    fn resize(&mut self, entries: usize) {
        let resized = vec![FREE; entries];
        let former = std::mem::replace(&mut self.entries, resized);
        for entry in former {
            if entry.owner.value != NONE
                && let Err(at) = self.find(self.spread.hash(entry.path), entry.path)
            {
                self.entries[at] = entry;
            }
        }
    }
}

/// The worker's position among the owners, or where it would be inserted.
#[inline]
fn position_of(owners: &[Owner], worker: WorkerId) -> Result<usize, usize> {
    match owners {
        [owner] if owner.worker == worker => Ok(0),
        [owner] => Err(usize::from(owner.worker < worker)),
        owners => owners.binary_search_by_key(&worker, |owner| owner.worker),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    const SPREAD: Spread = Spread(0x9e37_79b9_7f4a_7c15);
    /// Undoes it: the hash of a number times this is the number.
    const INVERSE: u64 = 0xf1de_83e1_9937_733d;

    #[derive(Clone, Debug)]
    enum Step {
        Insert {
            worker: u32,
            path: u64,
        },
        Remove {
            worker: u32,
            path: u64,
        },
        CountUp {
            worker: u32,
            path: u64,
        },
        CountDown {
            worker: u32,
            path: u64,
        },
        /// The worker owns nothing any more.
        Leave {
            worker: u32,
        },
        /// Only so many paths keep their owners.
        Keep {
            paths: usize,
        },
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        // Few homes in few shards, so that runs of entries meet and wrap around.
        let path = (0u64..40).prop_map(|path| match path % 2 {
            0 => path,
            _ => path.wrapping_mul(INVERSE) << 1,
        });
        let step = (0..40, 0u32..3, path).prop_map(|(kind, worker, path)| match (kind, kind % 4) {
            (0, _) => Step::Leave { worker },
            (1, _) => Step::Keep {
                paths: 2 * worker as usize,
            },
            (_, 0) => Step::Insert { worker, path },
            (_, 1) => Step::Remove { worker, path },
            (_, 2) => Step::CountUp { worker, path },
            _ => Step::CountDown { worker, path },
        });
        proptest::collection::vec(step, 0..400)
    }

    proptest! {
        #[test]
        fn it_equals_a_sorted_map(steps in steps()) {
            // It keeps hardly any memory, so that lists are numbered anew often.
            let table = OwnerTable::keeping(64, SPREAD, MIN_ENTRIES);
            let mut model: BTreeMap<u64, BTreeMap<u32, u32>> = BTreeMap::new();
            for (number, step) in (0..).zip(steps) {
                match step {
                    Step::Insert { worker, path } => {
                        let inserted = table.insert(WorkerId(worker), BlockHash(path), || number);
                        let owners = model.entry(path).or_default();
                        prop_assert_eq!(inserted.is_none(), owners.contains_key(&worker));
                        owners.entry(worker).or_insert(number);
                    }
                    Step::Remove { worker, path } => {
                        table.remove(WorkerId(worker), BlockHash(path));
                        model.entry(path).or_default().remove(&worker);
                    }
                    Step::CountUp { worker, path } => {
                        table.update(WorkerId(worker), BlockHash(path), |value| Some(value.unwrap_or(0) + 1));
                        *model.entry(path).or_default().entry(worker).or_insert(0) += 1;
                    }
                    Step::CountDown { worker, path } => {
                        let down = |value: Option<u32>| value?.checked_sub(1);
                        table.update(WorkerId(worker), BlockHash(path), down);
                        let owners = model.entry(path).or_default();
                        if let Some(left) = down(owners.remove(&worker)) {
                            owners.insert(worker, left);
                        }
                    }
                    Step::Leave { worker } => {
                        for (path, owners) in &mut model {
                            table.remove(WorkerId(worker), BlockHash(*path));
                            owners.remove(&worker);
                        }
                    }
                    Step::Keep { paths } => {
                        for (path, owners) in model.iter_mut().skip(paths) {
                            for worker in std::mem::take(owners).into_keys() {
                                table.remove(WorkerId(worker), BlockHash(*path));
                            }
                        }
                    }
                }
                for (path, owners) in &model {
                    table.prefetch(BlockHash(*path));
                    let expected: Vec<Owner> = owners
                        .iter()
                        .map(|(worker, value)| Owner { worker: WorkerId(*worker), value: *value })
                        .collect();
                    let found = table.read(BlockHash(*path), <[Owner]>::to_vec);
                    prop_assert_eq!(found, expected);
                }
            }
            prop_assert_eq!(table.is_empty(), model.values().all(BTreeMap::is_empty));
        }
    }

    #[test]
    fn entries_with_one_home_are_found_after_others_were_removed() {
        let mut entries = Entries::new(SPREAD, KEPT_ENTRIES);
        let home = entries.home(SPREAD.hash(1));
        let same_home = |path: &u64| entries.home(SPREAD.hash(*path)) == home;
        let paths: Vec<u64> = (1..).filter(same_home).take(5).collect();
        for (path, number) in paths.iter().zip(0..) {
            entries.update(SPREAD.hash(*path), *path, WorkerId(1), |_| Some(number));
        }
        assert_eq!(entries.entries.len(), MIN_ENTRIES);
        for (removed, path) in paths.iter().enumerate() {
            entries.update(SPREAD.hash(*path), *path, WorkerId(1), |_| None);
            for kept in &paths[removed + 1..] {
                assert!(entries.find(SPREAD.hash(*kept), *kept).is_ok());
            }
        }
        assert_eq!(entries.len, 0);
    }

    #[test]
    fn blocks_with_one_home_in_one_table_have_many_in_another() {
        let paths: Vec<u64> = (0..1_000_u64)
            .map(|hash| hash.wrapping_mul(INVERSE))
            .collect();
        let homes = |spread: Spread| {
            let homes_of_all = paths.iter().map(|path| spread.hash(*path) >> 48);
            homes_of_all.collect::<BTreeSet<u64>>().len()
        };
        assert_eq!(homes(SPREAD), 1);
        assert_eq!(homes(Spread(0xd134_2543_de82_ef95)), 1_000);
        let (first, second) = (OwnerTable::new(2).spread, OwnerTable::new(2).spread);
        assert_ne!(first.0, second.0);
        assert_eq!((first.0 & 1, second.0 & 1), (1, 1));
    }

    #[test]
    fn blocks_that_come_and_go_take_no_more_memory() {
        let table = OwnerTable::with_spread(64, SPREAD);
        for path in 0..200_000_u64 {
            for worker in 0..2 {
                table.insert(WorkerId(worker), BlockHash(path), || 1);
                if let Some(old) = path.checked_sub(1_000) {
                    table.remove(WorkerId(worker), BlockHash(old));
                }
            }
        }
        let shards = table.shards.iter().map(|shard| shard.0.read());
        let (entries, shared) = shards.fold((0, 0), |(entries, shared), shard| {
            (entries + shard.entries.len(), shared + shard.shared.len())
        });
        assert!(entries <= 1_000 * 8, "{entries}");
        assert!(shared <= 1_000 * 4, "{shared}");
    }

    #[test]
    fn blocks_that_keep_one_owner_give_the_memory_of_their_lists_back() {
        const PATHS: u64 = 20_000;
        let table = OwnerTable::with_spread(64, SPREAD);
        let lists = || -> usize {
            let shards = table.shards.iter().map(|shard| shard.0.read());
            shards.map(|shard| shard.shared.len()).sum()
        };
        let insert = |worker: u32, path: u64| {
            table.insert(WorkerId(worker), BlockHash(path), || path as u32 + worker);
        };
        for path in 0..PATHS {
            insert(0, path);
            insert(1, path);
        }
        assert_eq!(lists(), PATHS as usize);
        // Each hundredth block keeps both owners.
        for path in (0..PATHS).filter(|path| !path.is_multiple_of(100)) {
            table.remove(WorkerId(0), BlockHash(path));
        }
        assert!(lists() < PATHS as usize / 3, "{}", lists());
        // Each fiftieth gets another one, which needs a list again or has one already.
        for path in (0..PATHS).step_by(50) {
            insert(2, path);
        }
        for path in 0..PATHS {
            let workers: &[u32] = match (path % 50, path % 100) {
                (_, 0) => &[0, 1, 2],
                (0, _) => &[1, 2],
                _ => &[1],
            };
            let owner = |worker: &u32| Owner {
                worker: WorkerId(*worker),
                value: path as u32 + worker,
            };
            let expected: Vec<Owner> = workers.iter().map(owner).collect();
            let found = table.read(BlockHash(path), <[Owner]>::to_vec);
            assert_eq!(found, expected, "{path}");
        }
    }

    #[test]
    fn a_table_that_has_lost_most_of_its_blocks_gives_their_memory_back() {
        let table = OwnerTable::with_spread(64, SPREAD);
        let sizes = || {
            let shards = table.shards.iter().map(|shard| shard.0.read());
            shards.fold((0, 0), |(entries, shared), shard| {
                (entries + shard.entries.len(), shared + shard.shared.len())
            })
        };
        for path in 0..200_000_u64 {
            for worker in 0..3 {
                table.insert(WorkerId(worker), BlockHash(path), || path as u32 + worker);
            }
        }
        let (entries_before, shared_before) = sizes();
        assert!(entries_before >= 200_000 && shared_before == 200_000);
        // Each hundredth block keeps one owner, each thousandth two.
        for path in 0..200_000_u64 {
            for worker in 0..3 {
                let stays = match worker {
                    1 => path.is_multiple_of(100),
                    2 => path.is_multiple_of(1_000),
                    _ => false,
                };
                if !stays {
                    table.remove(WorkerId(worker), BlockHash(path));
                }
            }
        }
        let (entries, shared) = sizes();
        assert!(entries <= 64 * KEPT_ENTRIES, "{entries}");
        assert!(shared < shared_before / 10, "{shared}");
        for path in 0..200_000_u64 {
            let workers = match (path % 100, path % 1_000) {
                (_, 0) => 1..3,
                (0, _) => 1..2,
                _ => 0..0,
            };
            let owner = |worker: u32| Owner {
                worker: WorkerId(worker),
                value: path as u32 + worker,
            };
            let expected: Vec<Owner> = workers.map(owner).collect();
            let found = table.read(BlockHash(path), <[Owner]>::to_vec);
            assert_eq!(found, expected, "{path}");
        }
    }
}
