//! The forms of a request that one worker is sent in turn, until it takes one or none is left: each asks for less than the one
//! before. Engines of some versions refuse what the first ones ask for. Pure.

use bytes::Bytes;
use hyper::StatusCode;

/// What a form of a request asks for that an engine may refuse, though it would take the request without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::relay) enum Extra {
    /// The ids of the answer's tokens, so that its stream can go on on another worker.
    TokenIds,
    /// The dp rank that is to process it.
    Rank,
}

/// The form that is sent now, and those that are left.
#[derive(Clone, Copy, Debug)]
pub(in crate::relay) struct Offers<'a> {
    plain: &'a Bytes,
    /// The body that asks for token ids beside what the plain one asks for.
    asking: Option<&'a Bytes>,
    rank: Option<u32>,
    keeps_rank: bool,
}

impl<'a> Offers<'a> {
    /// `rank`: the dp rank that must process the request.
    pub(in crate::relay) fn new(plain: &'a Bytes, rank: Option<u32>) -> Self {
        Self {
            plain,
            asking: None,
            rank,
            keeps_rank: false,
        }
    }

    /// Before the plain form comes `body`, which asks for token ids.
    pub(in crate::relay) fn asking_token_ids(self, body: Option<&'a Bytes>) -> Self {
        Self {
            asking: body,
            ..self
        }
    }

    /// Each form names the rank.
    pub(in crate::relay) fn keeping_rank(self, keeps_rank: bool) -> Self {
        Self { keeps_rank, ..self }
    }

    pub(in crate::relay) fn body(&self) -> &'a Bytes {
        self.asking.unwrap_or(self.plain)
    }

    pub(in crate::relay) fn rank(&self) -> Option<u32> {
        self.rank
    }

    /// Takes the next form if the answer may refuse the request for something that this one asks for, and returns what that is.
    /// `first`: the first bytes of the answer's body.
    pub(in crate::relay) fn leave_out(
        &mut self,
        status: StatusCode,
        first: Option<&Bytes>,
    ) -> Option<Extra> {
        if self.asking.is_some() && may_refuse_member(status) {
            self.asking = None;
            return Some(Extra::TokenIds);
        }
        if self.rank.is_some() && !self.keeps_rank && may_refuse_rank(status, first) {
            self.rank = None;
            return Some(Extra::Rank);
        }
        None
    }
}

/// Whether an engine may have refused a request because of a member that it does not know.
fn may_refuse_member(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY
    )
}

/// Whether an engine may have refused a request because of the dp rank that it was pinned to.
pub(in crate::relay) fn may_refuse_rank(status: StatusCode, first: Option<&Bytes>) -> bool {
    // Engines write it as a member, as a header or as words.
    let letters = |byte: &u8| match byte {
        b'-' | b' ' => b'_',
        byte => byte.to_ascii_lowercase(),
    };
    let names_rank = |first: &Bytes| {
        let first: Vec<u8> = first.iter().map(letters).collect();
        ["data_parallel_rank", "dp_rank"]
            .iter()
            .any(|name| memchr::memmem::find(&first, name.as_bytes()).is_some())
    };
    status == StatusCode::BAD_REQUEST && first.is_some_and(names_rank)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANK: &[u8] = br#"{"error":"data_parallel_rank 3 is out of range"}"#;

    /// The bodies and ranks that an engine gets which answers each form with the same.
    fn sent(
        mut offers: Offers<'_>,
        status: u16,
        answer: &'static [u8],
    ) -> Vec<(Bytes, Option<u32>)> {
        let (status, first) = (StatusCode::from_u16(status).unwrap(), Bytes::from(answer));
        let mut sent = vec![(offers.body().clone(), offers.rank())];
        while offers.leave_out(status, Some(&first)).is_some() {
            sent.push((offers.body().clone(), offers.rank()));
        }
        sent
    }

    #[test]
    fn each_form_asks_for_less_until_nothing_is_left_to_leave_out() {
        let (plain, asking) = (Bytes::from("plain"), Bytes::from("asking"));
        let offers = Offers::new(&plain, Some(3)).asking_token_ids(Some(&asking));
        let all = [("asking", Some(3)), ("plain", Some(3)), ("plain", None)];
        let all = all.map(|(body, rank)| (Bytes::from(body), rank));
        assert_eq!(sent(offers, 400, RANK), all);
        // Nothing says that the rank is to blame.
        assert_eq!(sent(offers, 400, b"no"), all[..2]);
        assert_eq!(sent(offers, 422, RANK), all[..2]);
        assert_eq!(sent(offers, 503, RANK), all[..1]);
        assert_eq!(sent(offers, 200, RANK), all[..1]);
        assert_eq!(sent(offers.keeping_rank(true), 400, RANK), all[..2]);
        assert_eq!(sent(Offers::new(&plain, Some(3)), 400, RANK), all[1..]);
        assert_eq!(sent(Offers::new(&plain, None), 400, RANK), all[2..]);
    }

    #[test]
    fn a_refusal_names_the_rank_in_any_spelling() {
        for (message, expected) in [
            ("data_parallel_rank 3 is out of range [0, 2).", true),
            (
                "data parallel rank 3 is not connected to this frontend",
                true,
            ),
            ("X-Data-Parallel-Rank must be below 2", true),
            ("dp_rank out of range", true),
            ("rank", false),
        ] {
            let first = Bytes::from_static(message.as_bytes());
            let refuses = may_refuse_rank(StatusCode::BAD_REQUEST, Some(&first));
            assert_eq!(refuses, expected, "{message}");
        }
    }

    #[test]
    fn what_is_left_out_is_said() {
        let (plain, asking) = (Bytes::from("plain"), Bytes::from("asking"));
        let mut offers = Offers::new(&plain, Some(3)).asking_token_ids(Some(&asking));
        let first = Bytes::from(RANK);
        let status = StatusCode::BAD_REQUEST;
        assert_eq!(
            offers.leave_out(status, Some(&first)),
            Some(Extra::TokenIds)
        );
        assert_eq!(offers.leave_out(status, Some(&first)), Some(Extra::Rank));
        assert_eq!(offers.leave_out(status, Some(&first)), None);
    }
}
