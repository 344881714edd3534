//! SGLang: both legs are the client's request with the same three fields, at the same time. The engines meet at the prefill
//! worker's bootstrap server, and nothing passes through the router.

use super::types::quoted;
use crate::fleet::kv_transfer::BootstrapInfo;

/// The last room that engines take.
const MAX_ROOM: u64 = i64::MAX as u64;

/// Where the two engines of one attempt meet. A room is used once: of two attempts in one room, one would fail or get the
/// other's blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendezvous {
    host: String,
    port: u16,
    /// 0 to [`MAX_ROOM`].
    room: u64,
    /// The prefill worker's dp rank, if it has several. The engine takes the one that the room stands for.
    rank: Option<u32>,
}

impl Rendezvous {
    /// In a room of this random number, or in the next one that stands for `rank`, if the worker has that. `None` if the
    /// address of the bootstrap server cannot be read.
    pub fn new(bootstrap_info: &BootstrapInfo, random: u64, rank: Option<u32>) -> Option<Self> {
        let (_, address) = bootstrap_info.url.split_once("://")?;
        let (host, port) = address.trim_end_matches('/').rsplit_once(':')?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let ranks = bootstrap_info.ranks().len() as u64;
        let drawn = random >> 1;
        let room = match rank.map(u64::from) {
            Some(rank) if rank < ranks => {
                let room = drawn - drawn % ranks + rank;
                if room > MAX_ROOM { room - ranks } else { room }
            }
            _ => drawn,
        };
        Some(Self {
            host: host.to_owned(),
            port: port.parse().ok()?,
            room,
            rank: (ranks > 1).then(|| (room % ranks) as u32),
        })
    }

    /// The prefill leg's header `x-data-parallel-rank`.
    pub fn rank(&self) -> Option<u32> {
        self.rank
    }

    /// The fields of both legs, as JSON without braces. The rank tells the decode worker where to fetch. The prefill worker
    /// needs it too: without it, ranks that share no attention (plain `--dp-size`) take themselves for rank 0 and refuse
    /// the rooms of all others.
    pub(super) fn fields(&self) -> String {
        let Self {
            host, port, room, ..
        } = self;
        let host = quoted(host);
        let fields =
            format!(r#""bootstrap_host":{host},"bootstrap_port":{port},"bootstrap_room":{room}"#);
        match self.rank {
            Some(rank) => format!(r#"{fields},"disagg_prefill_dp_rank":{rank}"#),
            None => fields,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn info(url: &str, ranks: u32) -> BootstrapInfo {
        let page = format!(r#"{{"dp_size":{ranks}}}"#);
        BootstrapInfo::of_route(page.as_bytes(), url).unwrap()
    }

    #[test]
    fn both_legs_name_the_host_the_room_and_the_rank() {
        let one = Rendezvous::new(&info("http://10.0.0.5:8998", 1), u64::MAX, None).unwrap();
        let expected = r#""bootstrap_host":"10.0.0.5","bootstrap_port":8998,"bootstrap_room":9223372036854775807"#;
        assert_eq!(one.fields(), expected);
        assert_eq!(one.rank(), None);
        let two = Rendezvous::new(&info("http://[::1]:1", 2), 6, None).unwrap();
        assert_eq!(two.rank(), Some(1));
        assert_eq!(
            two.fields(),
            r#""bootstrap_host":"::1","bootstrap_port":1,"bootstrap_room":3,"disagg_prefill_dp_rank":1"#
        );
        assert_eq!(Rendezvous::new(&info("http://p", 1), 0, None), None);
    }

    proptest! {
        #[test]
        fn a_room_stands_for_its_rank(
            random in prop_oneof![any::<u64>(), u64::MAX - 200..=u64::MAX],
            ranks in 2u32..64,
            chosen in proptest::option::of(0u32..64),
        ) {
            let room = Rendezvous::new(&info("http://p:1", ranks), random, chosen).unwrap();
            prop_assert!(room.room <= MAX_ROOM);
            prop_assert!(room.room.abs_diff(random >> 1) < u64::from(ranks));
            prop_assert_eq!(room.rank, Some((room.room % u64::from(ranks)) as u32));
            if let Some(chosen) = chosen.filter(|chosen| *chosen < ranks) {
                prop_assert_eq!(room.rank, Some(chosen));
            }
        }
    }
}
