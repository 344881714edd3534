//! Merges the lists of several discoveries into one. Pure.

use std::collections::{BTreeMap, BTreeSet, btree_map};

use super::worker::{Member, Role};

/// The members of the fleet, each address once.
#[derive(Debug, Default)]
pub(super) struct Membership {
    /// In the order in which the discoveries list them.
    pub(super) members: Vec<Member>,
    /// Addresses that are listed with different roles. They get the narrowest of them.
    pub(super) role_conflicts: BTreeSet<String>,
}

impl Membership {
    pub(super) fn merge<'a>(listed: impl Iterator<Item = &'a Member>) -> Self {
        let mut merged = Self::default();
        let mut indices = BTreeMap::new();
        for member in listed {
            match indices.entry(&member.address) {
                btree_map::Entry::Vacant(free) => {
                    free.insert(merged.members.len());
                    merged.members.push(member.clone());
                }
                btree_map::Entry::Occupied(index) => {
                    let existing = &mut merged.members[*index.get()];
                    if existing.role != member.role {
                        merged.role_conflicts.insert(member.address.clone());
                    }
                    if narrowness(member.role) > narrowness(existing.role) {
                        existing.clone_from(member);
                    }
                }
            }
        }
        let mut names = BTreeSet::new();
        for member in &mut merged.members {
            if !names.insert(member.name.clone()) {
                // Two workers of one name would be indistinguishable in logs, metrics and drains.
                member.name.clone_from(&member.address);
            }
        }
        merged
    }
}

/// An engine may crash if it is asked for what it was not started for, while a prefill worker that is left out
/// of decoding only idles. So the narrowest role wins.
fn narrowness(role: Role) -> u8 {
    match role {
        Role::Both => 0,
        Role::Decode => 1,
        Role::Prefill => 2,
    }
}
