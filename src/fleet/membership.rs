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
    /// The members that are called by their address because another one has their name: address -> the listed name.
    pub(super) name_conflicts: BTreeMap<String, String>,
}

impl Membership {
    /// `names`: the members of now, address -> what it is called. `name_conflicts`: as the last merge had them. A
    /// member keeps what it is called for as long as it is listed with the same name, whoever else comes or goes: it would
    /// be another worker otherwise.
    pub(super) fn merge<'a>(
        listed: impl Iterator<Item = &'a Member>,
        names: &BTreeMap<&str, &str>,
        name_conflicts: &BTreeMap<String, String>,
    ) -> Self {
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
        merged.set_names(names, name_conflicts);
        merged
    }

    /// Calls all but one member of a name by their addresses: they would be indistinguishable in logs, metrics and
    /// drains.
    fn set_names(&mut self, names: &BTreeMap<&str, &str>, before: &BTreeMap<String, String>) {
        let has_its_name = |member: &&Member| names.get(&*member.address) == Some(&&*member.name);
        let with_names = self.members.iter().filter(has_its_name);
        // Name -> the address that has it.
        let mut owners: BTreeMap<String, String> = with_names
            .map(|member| (member.name.clone(), member.address.clone()))
            .collect();
        for member in &mut self.members {
            let address = &member.address;
            let was_in_conflict = before.get(address) == Some(&member.name);
            let has_name = !was_in_conflict
                && owners
                    .entry(member.name.clone())
                    .or_insert_with(|| address.clone())
                    == address;
            if !has_name {
                let listed = std::mem::replace(&mut member.name, address.clone());
                self.name_conflicts.insert(address.clone(), listed);
            }
        }
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
