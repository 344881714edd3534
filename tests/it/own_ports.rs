//! Ports that stay a test's own between two listeners on them.
//!
//! Systems give ports from 32768 (Linux) or 49152 (macOS) up to outgoing connections and to listeners that take any
//! port. So a port of that range that a test found free can be another's when a process of the test comes to listen on
//! it. Those below are given to nobody who does not ask for them.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

const FIRST: u32 = 20_000;
const COUNT: u32 = 12_000;

/// How many this process has given out.
static GIVEN: AtomicU32 = AtomicU32::new(0);

/// The first of `count` ports in a row, each of them free.
pub(crate) fn ports(count: u16) -> u16 {
    // Another run of the tests begins somewhere else.
    let start = std::process::id().wrapping_mul(379);
    for _ in 0..COUNT {
        let given = GIVEN.fetch_add(u32::from(count), Relaxed);
        let first = FIRST + start.wrapping_add(given) % (COUNT - u32::from(count));
        let first = u16::try_from(first).unwrap();
        if (first..first + count).all(is_free) {
            return first;
        }
    }
    panic!("no {count} ports in a row are free");
}

pub(crate) fn port() -> u16 {
    ports(1)
}

/// Nothing listens there yet.
pub(crate) fn address() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port()).into()
}

fn is_free(port: u16) -> bool {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok()
}
