//! The workers that have cached the longest prefixes of a prompt, and the one search for them.

use smallvec::SmallVec;

use crate::ids::WorkerId;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixOwner {
    pub worker: WorkerId,
    /// Length of the prefix.
    pub blocks: u32,
}

/// Owners of one prompt's prefixes, longest prefix first.
pub type PrefixOwners = SmallVec<[PrefixOwner; 8]>;

pub(super) struct Found {
    owners: PrefixOwners,
    limit: usize,
}

impl Found {
    /// Adds an owner, unless it was found with a longer prefix or there are enough.
    #[inline]
    pub(super) fn add(&mut self, worker: WorkerId, blocks: u32) {
        let owners = &mut self.owners;
        if owners.len() < self.limit && !owners.iter().any(|known| known.worker == worker) {
            owners.push(PrefixOwner { worker, blocks });
        }
    }
}

/// Finds up to `limit` owners of the longest prefixes. A worker that owns a prefix owns all shorter
/// ones, so each step is a binary search: for the longest prefix that has an owner, then for the
/// longest one before it that has more owners than were found, and so on.
///
/// `longest(end, count)` is how many of the prompt's first `end` prefixes have more than `count`
/// owners. `collect(prefix, found)` adds the owners of the prefix with that number, counted from 0.
#[inline]
pub(super) fn search(
    prefixes: usize,
    limit: usize,
    longest: impl Fn(usize, usize) -> usize,
    mut collect: impl FnMut(usize, &mut Found),
) -> PrefixOwners {
    let mut found = Found {
        owners: PrefixOwners::new(),
        limit,
    };
    let mut end = prefixes;
    while found.owners.len() < limit {
        let Some(last) = longest(end, found.owners.len()).checked_sub(1) else {
            break;
        };
        collect(last, &mut found);
        end = last;
    }
    found.owners
}
