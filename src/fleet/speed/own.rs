//! Whether a worker counts as those alike, or as what it was seen to be itself. Pure.

use super::learner::Learner;
use super::seen::SeenRows;
use super::types::Speed;

/// With fewer rows of its own, a worker counts as those alike.
const MIN_SAMPLES: u64 = 30;
/// A worker that differs by this much from those alike counts as what it was seen to be itself.
const DIFFERENT: f64 = 1.25;
/// One that counted as different must come nearer than this, so that choices do not change back and forth.
const ALIKE: f64 = 1.15;

/// What is learnt of one worker, beside a learner of all workers that are taken to be alike (`alike`).
#[derive(Debug, Default)]
pub struct OwnSpeed {
    learner: Learner,
    is_different: bool,
}

impl OwnSpeed {
    /// What was seen of the worker: for itself and for those alike.
    pub fn on_rows(&mut self, alike: &mut Learner, mut rows: SeenRows) {
        for learner in [&mut self.learner, alike] {
            learner.on_median(&mut rows.firsts);
            learner.on_median(&mut rows.ends);
        }
    }

    /// Another router has learnt it, from so many rows: it counts until there are enough rows here.
    pub fn on_peer(&mut self, alike: &mut Learner, speed: &Speed, samples: u64) {
        for learner in [&mut self.learner, alike] {
            if learner.samples() < MIN_SAMPLES.min(samples) {
                *learner = Learner::from_known(speed, samples.min(MIN_SAMPLES));
            }
        }
    }

    /// Its own once it is known and differs from those alike. Whether answers go on beside prompts is a matter of how an engine
    /// works, not of how fast its machine is, and one worker shows it badly: engines that were all alike seemed to differ from 4
    /// to 94 %, and requests went where they delayed nothing.
    pub fn speed(&mut self, alike: &Speed) -> Speed {
        let own = self.learner.speed();
        let factor = if self.is_different { ALIKE } else { DIFFERENT };
        self.is_different = self.learner.samples() >= MIN_SAMPLES && differs(&own, alike, factor);
        if self.is_different {
            Speed {
                overlap: alike.overlap,
                ..own
            }
        } else {
            *alike
        }
    }

    /// How many rows of the worker's own were seen.
    pub fn samples(&self) -> u64 {
        self.learner.samples()
    }
}

fn differs(own: &Speed, alike: &Speed, factor: f64) -> bool {
    let is_off = |own: f64, alike: f64| !(1.0 / factor..=factor).contains(&(own / alike));
    is_off(own.prompt_token, alike.prompt_token)
        || is_off(own.step, alike.step)
        || is_off(own.batch, alike.batch)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answers_of_a_slower_worker_go_on_beside_prompts_as_those_of_the_others_do() {
        let alike = Speed {
            overlap: 0.9,
            ..Speed::default()
        };
        let slow = Speed {
            prompt_token: 2.0 * alike.prompt_token,
            overlap: 0.1,
            ..alike
        };
        let mut own = OwnSpeed {
            learner: Learner::from_known(&slow, MIN_SAMPLES),
            is_different: false,
        };
        let found = own.speed(&alike);
        assert_eq!(found.overlap, alike.overlap);
        assert!(
            (found.prompt_token / slow.prompt_token - 1.0).abs() < 0.01,
            "{found:?}"
        );
    }
}
