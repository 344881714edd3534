//! Every prefill worker against every decode worker: who cannot hand over to whom, and why. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Connector, Mismatch, Shape};
use crate::fleet::health::Health;
use crate::fleet::{Role, Snapshot, Status};
use crate::ids::Model;

/// So many are named for each reason.
pub(super) const NAMED_MAX: usize = 8;

/// The pairs of the workers that are up.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pairs {
    pub count: usize,
    /// Of those, the ones that are known not to hand over. That the others do is not proved.
    pub unable: Vec<Unable>,
    /// Prefill workers, and decode workers that are not also the other, for whom there is nobody.
    pub alone: Vec<Arc<str>>,
}

/// The pairs that cannot hand over for one reason.
#[derive(Clone, Debug, PartialEq)]
pub struct Unable {
    pub why: Mismatch,
    pub count: usize,
    /// Some of them, prefill's name first.
    pub such_as: Vec<(Arc<str>, Arc<str>)>,
}

/// What decides it. Workers with the same are the same here, so that a thousand workers are a few
/// comparisons.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Kind {
    role: Kindred,
    shape: Shape,
    models: Vec<Model>,
    has_peer: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kindred {
    Prefill,
    Decode,
    Both,
}

impl Pairs {
    /// `topology` is the label that a pair must share; empty for none.
    pub fn of(snapshot: &Snapshot, connector: Connector, topology: &str) -> Self {
        let mut kinds: BTreeMap<Kind, Vec<&Status>> = BTreeMap::new();
        for status in &snapshot.workers {
            if status.health == Health::Up {
                kinds
                    .entry(kind(status, topology))
                    .or_default()
                    .push(status);
            }
        }
        let mut pairs = Self::default();
        let takes = |kind: &Kind| kind.role != Kindred::Prefill;
        let gives = |kind: &Kind| kind.role != Kindred::Decode;
        // By kind: how many workers each has that it could hand over to, or take from.
        let mut partners: BTreeMap<&Kind, usize> = BTreeMap::new();
        for (from, prefills) in kinds.iter().filter(|(kind, _)| gives(kind)) {
            for (to, decodes) in kinds.iter().filter(|(kind, _)| takes(kind)) {
                // Nobody hands over to itself.
                let own = if from == to { prefills.len() } else { 0 };
                let count = prefills.len() * decodes.len() - own;
                if count == 0 {
                    continue;
                }
                pairs.count += count;
                match super::mismatch(connector, topology, prefills[0], decodes[0]) {
                    Some(why) => pairs.add(why, count, prefills, decodes),
                    None => {
                        *partners.entry(from).or_default() += count;
                        *partners.entry(to).or_default() += count;
                    }
                }
            }
        }
        for (kind, workers) in &kinds {
            if kind.role != Kindred::Both && !partners.contains_key(kind) {
                let names = workers.iter().map(|status| status.worker.name.clone());
                pairs.alone.extend(names);
            }
        }
        pairs.alone.sort();
        pairs
    }

    /// Pairs that nothing is known to keep from handing over.
    pub fn not_proved(&self) -> usize {
        let unable: usize = self.unable.iter().map(|it| it.count).sum();
        self.count - unable
    }

    fn add(&mut self, why: Mismatch, count: usize, prefills: &[&Status], decodes: &[&Status]) {
        let known = self.unable.iter().position(|it| it.why == why);
        let place = known.unwrap_or(self.unable.len());
        if known.is_none() {
            self.unable.push(Unable {
                why,
                count: 0,
                such_as: Vec::new(),
            });
        }
        let unable = &mut self.unable[place];
        unable.count += count;
        let all = prefills
            .iter()
            .flat_map(|from| decodes.iter().map(move |to| (from, to)));
        let others = all.filter(|(from, to)| from.worker.id != to.worker.id);
        let names = others.map(|(from, to)| (from.worker.name.clone(), to.worker.name.clone()));
        let room = NAMED_MAX - unable.such_as.len();
        unable.such_as.extend(names.take(room));
    }
}

/// The workers that say nothing of where they stand, and so are pairs with each other alone.
pub fn unplaced(snapshot: &Snapshot, topology: &str) -> Vec<Arc<str>> {
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

fn kind(status: &Status, topology: &str) -> Kind {
    Kind {
        role: match status.worker.role {
            Role::Prefill => Kindred::Prefill,
            Role::Decode => Kindred::Decode,
            Role::Both => Kindred::Both,
        },
        shape: Shape::of(status, topology),
        models: status.facts.models.keys().cloned().collect(),
        has_peer: status.worker.peer.load().is_some(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::fleet::handoff::{Peer, mismatch};
    use crate::fleet::registry::Registry;
    use crate::fleet::registry::tests::{facts, member, registry};
    use crate::fleet::{Facts, Member};

    /// Role, model, block size, version, zone; whether its bootstrap server answers.
    type Row = (usize, usize, usize, usize, usize, bool);

    const ROLES: [Role; 3] = [Role::Prefill, Role::Decode, Role::Both];

    fn fleet(rows: &[Row]) -> Arc<Registry> {
        let fleet = registry(&[]);
        let members = rows.iter().enumerate().map(|(at, row)| Member {
            role: ROLES[row.0],
            labels: match row.4 {
                0 => BTreeMap::new(),
                zone => [("zone".to_owned(), zone.to_string().into())].into(),
            },
            ..member(&format!("w{at}"))
        });
        fleet.set_members("static", members.collect());
        let snapshot = fleet.snapshot().clone();
        for (status, row) in snapshot.workers.iter().zip(rows) {
            let id = status.worker.id;
            let known = Facts {
                block_size: [None, Some(16), Some(32)][row.2],
                version: [None, Some("1"), Some("2")][row.3].map(str::to_owned),
                ..facts(&[["m", "n"][row.1]])
            };
            fleet.set_facts(id, known);
            fleet.set_health(id, Health::Up);
            let peer = Peer::read(br#"{"0":{"engine_id":"e"}}"#, "http://p:1");
            fleet.set_peer(id, peer.filter(|_| row.5));
        }
        fleet
    }

    fn told(rows: &[Row], connector: Connector, topology: &str) -> Vec<String> {
        let fleet = fleet(rows);
        let pairs = Pairs::of(&fleet.snapshot(), connector, topology);
        let mut told: Vec<String> = pairs
            .unable
            .iter()
            .map(|it| format!("{} {} {:?}", it.count, it.why, it.such_as))
            .collect();
        told.sort();
        told.push(format!(
            "{} not proved, alone {:?}",
            pairs.not_proved(),
            pairs.alone
        ));
        told
    }

    #[test]
    fn workers_without_the_label_of_a_topology_are_named() {
        let zones = [0, 1, 2, 0].map(|zone| (0, 0, 0, 0, zone, false));
        let snapshot = fleet(&zones).snapshot().clone();
        let named = |topology| unplaced(&snapshot, topology).join(" ");
        assert_eq!(named("zone"), "w0 w3");
        assert_eq!(named("rack"), "w0 w1 w2 w3");
        assert_eq!(named(""), "");
    }

    #[test]
    fn pairs_that_cannot_hand_over_are_told_by_reason() {
        let rows = [
            (0, 0, 1, 1, 1, true),
            (0, 0, 2, 1, 2, false),
            (1, 0, 1, 1, 1, false),
            (1, 0, 1, 2, 0, false),
        ];
        assert_eq!(
            told(&rows, Connector::Nixl, ""),
            [
                r#"1 blocks of 32 tokens against 16 [("w1", "w2")]"#,
                r#"2 version 1 against 2 [("w0", "w3"), ("w1", "w3")]"#,
                r#"1 not proved, alone ["w1", "w3"]"#,
            ]
        );
        let rows = [
            (0, 0, 0, 0, 1, true),
            (0, 0, 0, 0, 0, false),
            (1, 0, 0, 0, 1, false),
            (1, 1, 0, 0, 1, false),
        ];
        assert_eq!(
            told(&rows[..3], Connector::Mooncake, ""),
            [
                r#"1 the prefill worker's bootstrap server does not answer [("w1", "w2")]"#,
                r#"1 not proved, alone ["w1"]"#,
            ]
        );
        assert_eq!(
            told(&rows[..3], Connector::Nixl, "zone"),
            [
                r#"1 in different places: (no label) and 1 [("w1", "w2")]"#,
                r#"1 not proved, alone ["w1"]"#,
            ]
        );
        assert_eq!(
            told(&[rows[0], rows[3]], Connector::Nixl, ""),
            [
                r#"1 they serve no model in common [("w0", "w1")]"#,
                r#"0 not proved, alone ["w0", "w1"]"#,
            ]
        );
    }

    #[test]
    fn only_workers_that_are_up_count_and_nobody_is_its_own_partner() {
        let fleet = fleet(&[
            (2, 0, 1, 1, 0, true),
            (2, 0, 1, 1, 0, true),
            (0, 0, 2, 1, 0, true),
        ]);
        let of = || Pairs::of(&fleet.snapshot(), Connector::Nixl, "");
        assert_eq!((of().count, of().not_proved()), (4, 2));
        let second = fleet.snapshot().workers[1].worker.id;
        fleet.set_health(second, Health::Down);
        assert_eq!((of().count, of().not_proved()), (1, 0));
    }

    proptest! {
        /// Against each pair on its own.
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
            let (mut count, mut not_proved) = (0, 0);
            let mut alone: Vec<Arc<str>> = Vec::new();
            for one in &snapshot.workers {
                let mut partners = 0;
                for other in &snapshot.workers {
                    let pair = |from: &Status, to: &Status| from.worker.id != to.worker.id
                        && from.worker.role != Role::Decode && to.worker.role != Role::Prefill;
                    let good = |from, to| pair(from, to) && mismatch(connector, topology, from, to).is_none();
                    count += usize::from(pair(one, other));
                    not_proved += usize::from(good(one, other));
                    partners += usize::from(good(one, other) || good(other, one));
                }
                if partners == 0 && one.worker.role != Role::Both {
                    alone.push(one.worker.name.clone());
                }
            }
            alone.sort();
            prop_assert_eq!((pairs.count, pairs.not_proved(), &pairs.alone), (count, not_proved, &alone));
            prop_assert!(pairs.unable.iter().all(|it| !it.such_as.is_empty() && it.such_as.len() <= it.count));
        }
    }
}
