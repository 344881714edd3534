//! All pairs of prefill and decode workers: between which no KV transfer is possible, and why. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::compatibility::CompatibilityKey;
use super::connector::Connector;
use super::mismatch::{Mismatch, mismatch};
use crate::fleet::health::Health;
use crate::fleet::{Role, Snapshot, Status};
use crate::ids::Model;

/// Examples listed per reason.
pub(super) const MAX_EXAMPLES: usize = 8;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pairs {
    pub count: usize,
    /// The pairs between which no KV transfer is possible. That the others work is unverified.
    pub incompatible: Vec<IncompatiblePairs>,
    /// Prefill workers and decode workers without a compatible partner.
    pub unpaired: Vec<Arc<str>>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct IncompatiblePairs {
    pub reason: Mismatch,
    pub count: usize,
    /// Some of the pairs: prefill worker, decode worker.
    pub examples: Vec<(Arc<str>, Arc<str>)>,
}

/// Workers of one class are interchangeable here, so a fleet of a thousand workers takes a few comparisons.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct WorkerClass {
    role: Role,
    compatibility_key: CompatibilityKey,
    models: Vec<Model>,
    has_bootstrap_info: bool,
}

impl WorkerClass {
    fn of(status: &Status, topology: &str) -> Self {
        Self {
            role: status.worker.role,
            compatibility_key: status.compatibility_key(topology),
            models: status.facts.models.keys().cloned().collect(),
            has_bootstrap_info: status.worker.bootstrap_info.load().is_some(),
        }
    }
}

impl Pairs {
    /// `topology` is the label that the workers of a pair must share; empty for none.
    pub fn of(snapshot: &Snapshot, connector: Connector, topology: &str) -> Self {
        let mut classes: BTreeMap<WorkerClass, Vec<&Status>> = BTreeMap::new();
        for status in &snapshot.workers {
            if status.health == Health::Up {
                let class = WorkerClass::of(status, topology);
                classes.entry(class).or_default().push(status);
            }
        }
        let mut pairs = Self::default();
        let takes_decode_legs = |class: &WorkerClass| class.role != Role::Prefill;
        let takes_prefill_legs = |class: &WorkerClass| class.role != Role::Decode;
        // The number of compatible pairs that each class takes part in.
        let mut partners: BTreeMap<&WorkerClass, usize> = BTreeMap::new();
        for (from, prefills) in classes
            .iter()
            .filter(|(class, _)| takes_prefill_legs(class))
        {
            for (to, decodes) in classes.iter().filter(|(class, _)| takes_decode_legs(class)) {
                // A worker is not paired with itself.
                let own = if from == to { prefills.len() } else { 0 };
                let count = prefills.len() * decodes.len() - own;
                if count == 0 {
                    continue;
                }
                pairs.count += count;
                match mismatch(connector, topology, prefills[0], decodes[0]) {
                    Some(reason) => pairs.add_incompatible(reason, count, prefills, decodes),
                    None => {
                        *partners.entry(from).or_default() += count;
                        *partners.entry(to).or_default() += count;
                    }
                }
            }
        }
        for (class, workers) in &classes {
            if class.role != Role::Both && !partners.contains_key(class) {
                let names = workers.iter().map(|status| status.worker.name.clone());
                pairs.unpaired.extend(names);
            }
        }
        pairs.unpaired.sort();
        pairs
    }

    /// Pairs without a known reason against a KV transfer.
    pub fn unverified(&self) -> usize {
        let incompatible: usize = self.incompatible.iter().map(|pairs| pairs.count).sum();
        self.count - incompatible
    }

    fn add_incompatible(
        &mut self,
        reason: Mismatch,
        count: usize,
        prefills: &[&Status],
        decodes: &[&Status],
    ) {
        let existing = self
            .incompatible
            .iter()
            .position(|pairs| pairs.reason == reason);
        let index = existing.unwrap_or(self.incompatible.len());
        if existing.is_none() {
            self.incompatible.push(IncompatiblePairs {
                reason,
                count: 0,
                examples: Vec::new(),
            });
        }
        let pairs = &mut self.incompatible[index];
        pairs.count += count;
        let all = prefills
            .iter()
            .flat_map(|from| decodes.iter().map(move |to| (from, to)));
        let others = all.filter(|(from, to)| from.worker.id != to.worker.id);
        let names = others.map(|(from, to)| (from.worker.name.clone(), to.worker.name.clone()));
        let free = MAX_EXAMPLES - pairs.examples.len();
        pairs.examples.extend(names.take(free));
    }
}

/// Workers without the topology label; they are paired only with each other.
pub fn unlabelled(snapshot: &Snapshot, topology: &str) -> Vec<Arc<str>> {
    if topology.is_empty() {
        return Vec::new();
    }
    let workers = snapshot.workers.iter().map(|status| &status.worker);
    let mut names: Vec<Arc<str>> = workers
        .filter(|worker| !worker.labels.contains_key(topology))
        .map(|worker| worker.name.clone())
        .collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::fleet::kv_transfer::BootstrapInfo;
    use crate::fleet::registry::Registry;
    use crate::fleet::registry::tests::{facts, member, registry};
    use crate::fleet::{Facts, Member};

    /// Role, model, block size, version, zone; whether its bootstrap server answers.
    type Row = (usize, usize, usize, usize, usize, bool);

    const ROLES: [Role; 3] = [Role::Prefill, Role::Decode, Role::Both];

    fn fleet(rows: &[Row]) -> Arc<Registry> {
        let fleet = registry(&[]);
        let members = rows.iter().enumerate().map(|(index, row)| Member {
            role: ROLES[row.0],
            labels: match row.4 {
                0 => BTreeMap::new(),
                zone => [("zone".to_owned(), zone.to_string().into())].into(),
            },
            ..member(&format!("w{index}"))
        });
        fleet.set_members("static", members.collect());
        let snapshot = fleet.snapshot().clone();
        for (status, row) in snapshot.workers.iter().zip(rows) {
            let id = status.worker.id;
            let reported = Facts {
                block_size: [None, Some(16), Some(32)][row.2],
                version: [None, Some("1"), Some("2")][row.3].map(str::to_owned),
                ..facts(&[["m", "n"][row.1]])
            };
            fleet.set_facts(id, reported);
            fleet.set_health(id, Health::Up);
            let info = BootstrapInfo::parse(br#"{"0":{"engine_id":"e"}}"#, "http://p:1");
            fleet.set_bootstrap_info(id, info.filter(|_| row.5));
        }
        fleet
    }

    fn summary(rows: &[Row], connector: Connector, topology: &str) -> Vec<String> {
        let fleet = fleet(rows);
        let pairs = Pairs::of(&fleet.snapshot(), connector, topology);
        let mut lines: Vec<String> = pairs
            .incompatible
            .iter()
            .map(|pairs| format!("{} {} {:?}", pairs.count, pairs.reason, pairs.examples))
            .collect();
        lines.sort();
        lines.push(format!(
            "{} unverified, unpaired {:?}",
            pairs.unverified(),
            pairs.unpaired
        ));
        lines
    }

    #[test]
    fn workers_without_the_topology_label_are_listed() {
        let zones = [0, 1, 2, 0].map(|zone| (0, 0, 0, 0, zone, false));
        let snapshot = fleet(&zones).snapshot().clone();
        let named = |topology| unlabelled(&snapshot, topology).join(" ");
        assert_eq!(named("zone"), "w0 w3");
        assert_eq!(named("rack"), "w0 w1 w2 w3");
        assert_eq!(named(""), "");
    }

    #[test]
    fn incompatible_pairs_are_counted_by_reason() {
        let rows = [
            (0, 0, 1, 1, 1, true),
            (0, 0, 2, 1, 2, false),
            (1, 0, 1, 1, 1, false),
            (1, 0, 1, 2, 0, false),
        ];
        assert_eq!(
            summary(&rows, Connector::Nixl, ""),
            [
                r#"1 block sizes differ: 32 and 16 tokens [("w1", "w2")]"#,
                r#"2 engine versions differ: 1 and 2 [("w0", "w3"), ("w1", "w3")]"#,
                r#"1 unverified, unpaired ["w1", "w3"]"#,
            ]
        );
        let rows = [
            (0, 0, 0, 0, 1, true),
            (0, 0, 0, 0, 0, false),
            (1, 0, 0, 0, 1, false),
            (1, 1, 0, 0, 1, false),
        ];
        assert_eq!(
            summary(&rows[..3], Connector::Mooncake, ""),
            [
                r#"1 the prefill worker's bootstrap server does not answer [("w1", "w2")]"#,
                r#"1 unverified, unpaired ["w1"]"#,
            ]
        );
        assert_eq!(
            summary(&rows[..3], Connector::Nixl, "zone"),
            [
                r#"1 topology labels differ: (no label) and 1 [("w1", "w2")]"#,
                r#"1 unverified, unpaired ["w1"]"#,
            ]
        );
        assert_eq!(
            summary(&[rows[0], rows[3]], Connector::Nixl, ""),
            [
                r#"1 they serve no model in common [("w0", "w1")]"#,
                r#"0 unverified, unpaired ["w0", "w1"]"#,
            ]
        );
    }

    #[test]
    fn only_workers_that_are_up_count_and_no_worker_is_its_own_partner() {
        let fleet = fleet(&[
            (2, 0, 1, 1, 0, true),
            (2, 0, 1, 1, 0, true),
            (0, 0, 2, 1, 0, true),
        ]);
        let of = || Pairs::of(&fleet.snapshot(), Connector::Nixl, "");
        assert_eq!((of().count, of().unverified()), (4, 2));
        let second = fleet.snapshot().workers[1].worker.id;
        fleet.set_health(second, Health::Down);
        assert_eq!((of().count, of().unverified()), (1, 0));
    }

    proptest! {
        /// Compares with a check of every pair.
        #[test]
        fn the_counts_are_those_of_all_pairs(
            rows in proptest::collection::vec((0usize..3, 0usize..2, 0usize..3, 0usize..3, 0usize..3, any::<bool>()), 0..12),
            by_zone in any::<bool>(), second in any::<bool>(),
        ) {
            let fleet = fleet(&rows);
            let topology = if by_zone { "zone" } else { "" };
            let connector = Connector::ALL[usize::from(second)];
            let snapshot = fleet.snapshot();
            let pairs = Pairs::of(&snapshot, connector, topology);
            let (mut count, mut unverified) = (0, 0);
            let mut unpaired: Vec<Arc<str>> = Vec::new();
            for one in &snapshot.workers {
                let mut partners = 0;
                for other in &snapshot.workers {
                    let pair = |from: &Status, to: &Status| from.worker.id != to.worker.id
                        && from.worker.role != Role::Decode && to.worker.role != Role::Prefill;
                    let good = |from, to| pair(from, to) && mismatch(connector, topology, from, to).is_none();
                    count += usize::from(pair(one, other));
                    unverified += usize::from(good(one, other));
                    partners += usize::from(good(one, other) || good(other, one));
                }
                if partners == 0 && one.worker.role != Role::Both {
                    unpaired.push(one.worker.name.clone());
                }
            }
            unpaired.sort();
            prop_assert_eq!((pairs.count, pairs.unverified(), &pairs.unpaired), (count, unverified, &unpaired));
            prop_assert!(pairs.incompatible.iter().all(|same| !same.examples.is_empty() && same.examples.len() <= same.count));
        }
    }
}
