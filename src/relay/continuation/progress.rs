//! How far a stream has come, token for token, for another router process that goes on with it. Pure.
//!
//! The reader of the stream notes it here, and the caller takes it in parts, each after the text that it is about.
//! Parts that are put one behind the other are read as one.

use parking_lot::Mutex;

use super::refusal::Refusal;

/// The form of a part. A release that does not know it refuses to go on.
const VERSION: u8 = 1;

/// What is not a token id.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    /// How often the stream was continued.
    pub(super) times: u32,
    /// Tokens of reasoning.
    pub(super) reasoning: u32,
    /// How many ids came with the last text.
    pub(super) last_ids: u32,
    /// Tokens of the prompt that the first worker had cached, as the router expected.
    pub(super) cached: u32,
    /// Why the stream cannot be continued.
    pub(super) refusal: Option<Refusal>,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Progress(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// `None` before the first text.
    counts: Option<Counts>,
    /// Ids of the prompt that were not taken.
    prompt: Vec<u32>,
    /// Ids of the answer that were not taken.
    answer: Vec<u32>,
    has_prompt: bool,
    /// Ids of the answer, with those that were taken.
    made: usize,
    /// The model whose tokens they are; empty once it was taken.
    model: String,
}

impl Progress {
    /// The stream begins again, on another engine.
    pub fn restart(&self) {
        *self.0.lock() = State::default();
    }

    /// The stream goes on after what `resume` has, which is stored.
    pub fn resume(&self, resume: &Resume) {
        *self.0.lock() = State {
            has_prompt: true,
            made: resume.answer.len(),
            ..State::default()
        };
    }

    /// The stream is one of this model.
    pub(in crate::relay) fn begin(&self, model: &str) {
        let mut state = self.0.lock();
        if !state.has_prompt {
            model.clone_into(&mut state.model);
        }
    }

    pub(in crate::relay) fn refuse(&self, refusal: Refusal) {
        let mut state = self.0.lock();
        state.counts.get_or_insert_default().refusal = Some(refusal);
    }

    /// Text was passed up to the end of `answer`.
    pub(super) fn note(&self, counts: Counts, prompt: &[u32], answer: &[u32]) {
        let mut state = self.0.lock();
        let state = &mut *state;
        if !state.has_prompt && !prompt.is_empty() {
            state.has_prompt = true;
            state.prompt.extend_from_slice(prompt);
        }
        if let Some(new) = answer.get(state.made..) {
            state.answer.extend_from_slice(new);
            state.made = answer.len();
        }
        state.counts = Some(counts);
    }

    /// What was noted since the last part; empty if nothing was ever noted. False if the stream cannot be continued.
    pub fn take(&self) -> (Vec<u8>, bool) {
        let mut state = self.0.lock();
        let Some(counts) = state.counts else {
            return (Vec::new(), false);
        };
        let from = state.made - state.answer.len();
        let taken = State {
            prompt: std::mem::take(&mut state.prompt),
            answer: std::mem::take(&mut state.answer),
            model: std::mem::take(&mut state.model),
            ..State::default()
        };
        drop(state);
        (written(counts, from, &taken), counts.refusal.is_none())
    }
}

fn written(counts: Counts, from: usize, state: &State) -> Vec<u8> {
    let refusal = counts.refusal.map_or("", Refusal::as_str);
    let (prompt, answer, model) = (&state.prompt, &state.answer, &state.model);
    let numbers = [
        counts.times,
        counts.reasoning,
        counts.last_ids,
        counts.cached,
        refusal.len() as u32,
        model.len() as u32,
        from as u32,
        prompt.len() as u32,
        answer.len() as u32,
    ];
    let ids = prompt.iter().chain(answer);
    let mut part = Vec::with_capacity(64 + 4 * (prompt.len() + answer.len()));
    part.push(VERSION);
    for number in numbers.iter().chain(ids) {
        part.extend_from_slice(&number.to_le_bytes());
    }
    part.extend_from_slice(refusal.as_bytes());
    part.extend_from_slice(model.as_bytes());
    part
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resume {
    pub(super) counts: Counts,
    /// The ids of the client's prompt, and of the answer.
    pub(super) prompt: Vec<u32>,
    pub(super) answer: Vec<u32>,
    /// Whose tokens they are.
    pub(super) model: String,
}

impl Resume {
    /// Reads the parts of a stream; the reason if it cannot go on.
    pub fn read<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Result<Self, &'static str> {
        let mut resume = Self::default();
        for mut part in parts {
            while !part.is_empty() {
                let read = resume.read_part(part);
                part = read.ok_or(Refusal::NotStored.as_str())?;
            }
        }
        match resume.counts.refusal {
            Some(refusal) => Err(refusal.as_str()),
            None if resume.prompt.is_empty() || resume.answer.is_empty() => {
                Err(Refusal::NotStored.as_str())
            }
            None => Ok(resume),
        }
    }

    /// Reads one part, and returns what comes behind it.
    fn read_part<'a>(&mut self, part: &'a [u8]) -> Option<&'a [u8]> {
        let mut rest = part.strip_prefix(&[VERSION])?;
        let mut next = || {
            let (number, behind) = rest.split_first_chunk::<4>()?;
            rest = behind;
            Some(u32::from_le_bytes(*number))
        };
        let counts = Counts {
            times: next()?,
            reasoning: next()?,
            last_ids: next()?,
            cached: next()?,
            refusal: None,
        };
        let lengths = [next()?, next()?, next()?, next()?, next()?];
        let [refusal, model, from, prompt, answer] = lengths.map(|length| length as usize);
        let ids = |count: usize, rest: &mut &'a [u8]| {
            let (ids, behind) = rest.split_at_checked(count.checked_mul(4)?)?;
            *rest = behind;
            let (ids, _) = ids.as_chunks::<4>();
            Some(ids.iter().map(|id| u32::from_le_bytes(*id)))
        };
        let (prompt, answer) = (ids(prompt, &mut rest)?, ids(answer, &mut rest)?);
        let (refusal, rest) = rest.split_at_checked(refusal)?;
        let (model, behind) = rest.split_at_checked(model)?;
        if !model.is_empty() {
            self.model = String::from_utf8(model.to_vec()).ok()?;
        }
        self.counts = Counts {
            // What this release does not know is as good as not stored.
            refusal: (!refusal.is_empty())
                .then(|| Refusal::read(refusal).unwrap_or(Refusal::NotStored)),
            ..counts
        };
        if prompt.len() > 0 {
            self.prompt = prompt.collect();
        }
        if from > self.answer.len() {
            return None;
        }
        self.answer.truncate(from);
        self.answer.extend(answer);
        Some(behind)
    }

    pub(in crate::relay) fn is_of(&self, model: &str) -> bool {
        self.model == model
    }

    pub fn answer_tokens(&self) -> usize {
        self.answer.len()
    }

    /// How often the stream was continued before.
    pub fn times(&self) -> u32 {
        self.counts.times
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_stream_that_cannot_go_on_says_why() {
        let progress = Progress::default();
        assert_eq!(progress.take(), (Vec::new(), false));
        progress.note(Counts::default(), &[1], &[2]);
        let (mut part, may_go_on) = progress.take();
        assert!(may_go_on && Resume::read([&*part]).is_ok());
        progress.refuse(Refusal::Seed);
        let (refused, may_go_on) = progress.take();
        assert!(!may_go_on);
        assert_eq!(Resume::read([&*part, &*refused]), Err("seed"));
        assert_eq!(Resume::read([]), Err("not_stored"));
        // Cut, of a newer release, with a hole.
        assert_eq!(Resume::read([&part[..part.len() - 1]]), Err("not_stored"));
        assert_eq!(Resume::read([&*refused]), Err("not_stored"));
        part[0] = 2;
        assert_eq!(Resume::read([&*part]), Err("not_stored"));
    }

    /// A replica of another release goes on after it.
    #[test]
    fn the_bytes_of_a_part_stay_as_they_are() {
        let progress = Progress::default();
        progress.begin("m");
        let counts = Counts {
            times: 1,
            reasoning: 2,
            last_ids: 3,
            cached: 4,
            refusal: None,
        };
        progress.note(counts, &[10], &[11, 12]);
        progress.refuse(Refusal::Seed);
        let mut expected = vec![1];
        // The counts, lengths of the refusal and the model's name, ids before, ids of prompt and answer, the ids.
        for number in [1_u32, 2, 3, 4, 4, 1, 0, 1, 2, 10, 11, 12] {
            expected.extend_from_slice(&number.to_le_bytes());
        }
        expected.extend_from_slice(b"seedm");
        assert_eq!(progress.take(), (expected, false));
    }

    proptest! {
        #[test]
        fn parts_are_read_as_the_whole(
            prompt in proptest::collection::vec(any::<u32>(), 1..9),
            answer in proptest::collection::vec(any::<u32>(), 1..40),
            cuts in proptest::collection::vec((0..40usize, any::<bool>()), 0..9),
            times in 0..3u32,
        ) {
            let progress = Progress::default();
            progress.begin("m");
            let mut ends: Vec<(usize, bool)> = cuts.into_iter().map(|(end, joins)| (end.min(answer.len()), joins)).collect();
            ends.sort_unstable();
            ends.push((answer.len(), false));
            let mut parts: Vec<Vec<u8>> = vec![Vec::new()];
            let counts = Counts { times, reasoning: 1, last_ids: 2, cached: 3, refusal: None };
            for (end, joins) in ends {
                progress.note(counts, &prompt, &answer[..end]);
                let (part, may_go_on) = progress.take();
                prop_assert!(may_go_on);
                if joins {
                    parts.last_mut().unwrap().extend(part);
                } else {
                    parts.push(part);
                }
            }
            let resume = Resume::read(parts.iter().map(Vec::as_slice)).unwrap();
            prop_assert_eq!(&resume, &Resume { counts, prompt, answer, model: "m".to_owned() });
            // What the next owner adds is read behind it.
            let next = Progress::default();
            next.resume(&resume);
            let more: Vec<u32> = resume.answer.iter().copied().chain([7, 8]).collect();
            next.note(counts, &resume.prompt, &more);
            parts.push(next.take().0);
            let all = Resume::read(parts.iter().map(Vec::as_slice)).unwrap();
            prop_assert_eq!((&all.prompt, &all.answer), (&resume.prompt, &more));
        }
    }
}
