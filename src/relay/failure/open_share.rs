//! How many circuit breakers failed requests alone may open: those of at most half of the workers that do one part of a
//! model's requests. What fails at most of them is more likely due to requests, and the rest could not carry the load.
//! Pure.

use crate::fleet::Role;

/// The workers that do one part of a request.
#[derive(Clone, Copy, Debug, Default)]
struct Share {
    open: usize,
    all: usize,
}

impl Share {
    fn add(&mut self, is_open: bool) {
        self.open += usize::from(is_open);
        self.all += 1;
    }

    fn has_room_for_one(self) -> bool {
        (self.open + 1) * 2 <= self.all
    }
}

/// Whether the closed circuit breaker of a worker of this role may open. `workers`: the role of each of the model's
/// workers, this one included, and whether its circuit breaker is open. `computes_locally`: decode workers compute prompts
/// where no prefill worker does.
pub(in crate::relay) fn may_open_one_more(
    role: Role,
    computes_locally: bool,
    workers: impl Iterator<Item = (Role, bool)>,
) -> bool {
    let (mut prompts, mut answers) = (Share::default(), Share::default());
    for (other, is_open) in workers {
        if other != Role::Decode || computes_locally {
            prompts.add(is_open);
        }
        if other != Role::Prefill {
            answers.add(is_open);
        }
    }
    (role == Role::Decode || prompts.has_room_for_one())
        && (role == Role::Prefill || answers.has_room_for_one())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Each letter of `workers` is one: `p` prefill, `d` decode, `b` both; a capital one is open.
    fn check(workers: &str, computes_locally: bool, may_open: &str) {
        let role = |letter: char| match letter.to_ascii_lowercase() {
            'p' => Role::Prefill,
            'd' => Role::Decode,
            'b' => Role::Both,
            other => panic!("{other}"),
        };
        for letter in ['p', 'd', 'b'] {
            if !workers.contains(letter) {
                continue;
            }
            let letters = workers.chars();
            let all = letters.map(|worker| (role(worker), worker.is_ascii_uppercase()));
            let found = may_open_one_more(role(letter), computes_locally, all);
            let expected = may_open.contains(letter);
            assert_eq!(found, expected, "{letter} of {workers}, {computes_locally}");
        }
    }

    #[test]
    fn half_of_the_workers_without_roles_open_and_no_lone_one() {
        for computes_locally in [false, true] {
            for (workers, may_open) in [
                ("b", ""),
                ("bb", "b"),
                ("Bb", ""),
                ("bbb", "b"),
                ("Bbb", ""),
                ("Bbbb", "b"),
                ("BBbb", ""),
            ] {
                check(workers, computes_locally, may_open);
            }
        }
    }

    #[test]
    fn half_of_the_workers_for_each_part_open() {
        for (workers, may_open) in [
            ("pd", ""),
            ("ppd", "p"),
            ("pdd", "d"),
            ("ppdd", "pd"),
            ("ppDd", "p"),
            ("Ppdd", "d"),
            ("ppppDd", "p"),
            // A worker of both roles does both parts.
            ("pdb", "pdb"),
            ("pDb", "p"),
            ("Pdb", "d"),
            ("pdB", ""),
            ("db", "d"),
            ("pb", "p"),
        ] {
            check(workers, false, may_open);
        }
    }

    #[test]
    fn prefill_workers_open_where_decode_workers_can_compute_prompts() {
        for (workers, may_open) in [
            ("pd", "p"),
            ("ppdd", "pd"),
            ("Ppdd", "pd"),
            ("ppDd", "p"),
            ("PpDd", ""),
            ("db", "db"),
        ] {
            check(workers, true, may_open);
        }
    }

    proptest! {
        /// Whichever workers fail in whichever order: for each part, at least half of the workers stay.
        #[test]
        fn at_least_half_of_the_workers_for_each_part_stay(
            roles in proptest::collection::vec(0usize..3, 1..12),
            order in proptest::collection::vec(0usize..12, 0..40),
        ) {
            let roles = roles.into_iter().map(|role| [Role::Prefill, Role::Decode, Role::Both][role]);
            let mut workers: Vec<(Role, bool)> = roles.map(|role| (role, false)).collect();
            for place in order {
                let place = place % workers.len();
                let may_open = may_open_one_more(workers[place].0, false, workers.iter().copied());
                workers[place].1 |= may_open;
            }
            for other in [Role::Prefill, Role::Decode] {
                let part = || workers.iter().filter(|(role, _)| *role != other);
                let open = part().filter(|(_, is_open)| *is_open).count();
                prop_assert!(2 * open <= part().count());
            }
        }
    }
}
