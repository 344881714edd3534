//! How long prompts and answers may be together at the workers of a model. Pure.

use crate::ids::WorkerId;

/// The workers whose engines take less than those of others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContextLengths {
    /// With the most tokens that each takes.
    shorter: Vec<(WorkerId, u32)>,
}

impl ContextLengths {
    /// `workers` with the most tokens of a request that their engines take, as they report; one that reports nothing takes as much
    /// as any.
    pub(super) fn of(workers: impl Iterator<Item = (WorkerId, Option<u32>)> + Clone) -> Self {
        let longest = workers
            .clone()
            .map(|(_, tokens)| tokens.unwrap_or(u32::MAX))
            .max();
        let shorter = workers.filter_map(|(worker, tokens)| Some((worker, tokens?)));
        Self {
            shorter: shorter
                .filter(|(_, tokens)| Some(*tokens) < longest)
                .collect(),
        }
    }

    /// Whether all take the same.
    pub fn are_alike(&self) -> bool {
        self.shorter.is_empty()
    }

    /// The workers that take less than others.
    pub fn shorter(&self) -> impl Iterator<Item = WorkerId> {
        self.shorter.iter().map(|(worker, _)| *worker)
    }

    /// The workers that take less than others, and in which a request of so many tokens has no room.
    pub fn too_short(&self, tokens: u32) -> impl Iterator<Item = WorkerId> {
        let shorter = self.shorter.iter();
        let too_short = shorter.filter(move |(_, most)| *most < tokens);
        too_short.map(|(worker, _)| *worker)
    }

    /// Whether a request that was taken for one of `tokens` may in truth be too long for this worker, and not for another one.
    /// A token is taken for some bytes where it is not known; texts differ from that by a factor of 2 to 3.
    pub fn may_be_too_short(&self, worker: WorkerId, tokens: u32) -> bool {
        let mut shorter = self.shorter.iter();
        shorter.any(|(id, most)| *id == worker && *most / 3 < tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(of: &[Option<u32>]) -> ContextLengths {
        ContextLengths::of((0..).map(WorkerId).zip(of.iter().copied()))
    }

    fn too_short(of: &[Option<u32>], tokens: u32) -> Vec<u32> {
        let lengths = lengths(of);
        lengths.too_short(tokens).map(|worker| worker.0).collect()
    }

    #[test]
    fn a_request_goes_where_it_fits_and_to_the_longest_if_it_fits_nowhere() {
        let of = [Some(4_096), Some(131_072), Some(32_768), Some(131_072)];
        assert_eq!(too_short(&of, 4_096), [0; 0]);
        assert_eq!(too_short(&of, 4_097), [0]);
        assert_eq!(too_short(&of, 100_000), [0, 2]);
        assert_eq!(too_short(&of, 200_000), [0, 2]);
        assert!(!lengths(&of).are_alike());
    }

    #[test]
    fn workers_that_are_alike_or_say_nothing_get_everything() {
        for of in [&[][..], &[Some(4_096)], &[Some(4_096); 3], &[None, None]] {
            assert!(lengths(of).are_alike());
            assert_eq!(too_short(of, 10_000), [0; 0]);
        }
        assert_eq!(too_short(&[Some(4_096), None], 10_000), [0]);
    }

    #[test]
    fn a_worker_that_refuses_an_estimated_prompt_may_be_too_short_for_it() {
        let lengths = lengths(&[Some(4_096), Some(131_072)]);
        let may = |worker, tokens| lengths.may_be_too_short(WorkerId(worker), tokens);
        assert!(may(0, 4_000) && may(0, 1_500));
        assert!(!may(0, 1_000) && !may(1, 100_000));
    }
}
