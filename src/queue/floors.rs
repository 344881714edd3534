//! Which class is next: the highest that waits, unless a lower one is owed tokens of its floor.
//!
//! While a class waits it earns its share of every token that any class sends. Once it has earned its next request it
//! goes first. What it sends beyond its share costs it nothing later.

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Floor {
    pub(super) min_share: f64,
    owed: f64,
}

impl Floor {
    pub(super) fn new(min_share: f64) -> Self {
        Self {
            min_share,
            owed: 0.0,
        }
    }

    /// Its last request has left.
    pub(super) fn on_empty(&mut self) {
        self.owed = 0.0;
    }

    fn excess(&self, tokens: u64) -> f64 {
        self.owed - tokens as f64
    }
}

/// The index of the next class. `heads` are the tokens of each class's next request, highest class first; `None` for a
/// class where none waits.
pub(super) fn next(floors: &[Floor], heads: &[Option<u64>]) -> Option<usize> {
    let waiting = || {
        heads
            .iter()
            .enumerate()
            .filter_map(|(at, tokens)| Some((at, (*tokens)?)))
    };
    let owed = waiting()
        .map(|(at, tokens)| (at, floors[at].excess(tokens)))
        .filter(|(at, excess)| *excess >= 0.0 && floors[*at].min_share > 0.0)
        .max_by(|a, b| a.1.total_cmp(&b.1));
    owed.or_else(|| waiting().map(|(at, _)| (at, 0.0)).next())
        .map(|(at, _)| at)
}

/// The class at `sender` has sent so many tokens.
pub(super) fn on_sent(floors: &mut [Floor], heads: &[Option<u64>], sender: usize, tokens: u64) {
    for (floor, _) in floors
        .iter_mut()
        .zip(heads)
        .filter(|(_, head)| head.is_some())
    {
        floor.owed += floor.min_share * tokens as f64;
    }
    let sender = &mut floors[sender];
    sender.owed = (sender.owed - tokens as f64).max(0.0);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_highest_class_is_first_until_another_is_owed() {
        let mut floors = [Floor::new(0.0), Floor::new(0.25)];
        let heads = [Some(100), Some(100)];
        let mut order = Vec::new();
        for _ in 0..9 {
            let at = next(&floors, &heads).unwrap();
            on_sent(&mut floors, &heads, at, 100);
            order.push(at);
        }
        assert_eq!(order, [0, 0, 0, 0, 1, 0, 0, 0, 1]);
        assert_eq!(next(&floors, &[None, Some(1)]), Some(1));
        assert_eq!(next(&floors, &[None, None]), None);
    }

    #[test]
    fn a_class_without_a_floor_waits_for_the_higher_ones() {
        let mut floors = [Floor::new(0.5), Floor::new(0.0)];
        let heads = [Some(1), Some(0)];
        for _ in 0..100 {
            assert_eq!(next(&floors, &heads), Some(0));
            on_sent(&mut floors, &heads, 0, 1);
        }
    }

    proptest! {
        /// Over any time in which it waits, a class gets its share less what a few requests can be.
        #[test]
        fn no_class_gets_less_than_its_floor(
            shares in prop::collection::vec(0.0..1.0f64, 2..6),
            sizes in prop::collection::vec(1u64..1_000, 500..1_500),
        ) {
            let sum: f64 = shares.iter().sum();
            let mut floors: Vec<Floor> = shares.iter().map(|share| Floor::new(share / sum.max(1.0))).collect();
            let mut sizes = sizes.into_iter();
            let mut heads: Vec<Option<u64>> = floors.iter().map(|_| sizes.next()).collect();
            let (mut all, mut sent) = (0.0, vec![0.0; floors.len()]);
            for size in sizes {
                let at = next(&floors, &heads).unwrap();
                let tokens = heads[at].unwrap();
                on_sent(&mut floors, &heads, at, tokens);
                heads[at] = Some(size);
                all += tokens as f64;
                sent[at] += tokens as f64;
                for (floor, sent) in floors.iter().zip(&sent) {
                    let slack = 1_000.0 * (floors.len() + 1) as f64;
                    prop_assert!(*sent >= floor.min_share * all - slack, "{floors:?} {sent} of {all}");
                }
            }
        }
    }
}
