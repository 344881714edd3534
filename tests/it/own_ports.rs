//! Ports that stay a test's own between two listeners on them.
//!
//! Systems give ports from 32768 (Linux) or 49152 (macOS) up to outgoing connections and to listeners that take any
//! port. So a port of that range that a test found free can be another's when a process of the test comes to listen on
//! it. Those below are given only to who asks for them. They are in blocks, and each process of tests takes ports from
//! its own blocks: it listens on their first ports for as long as it lives, so that no other process takes them.

use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::ops::Range;

use parking_lot::Mutex;

const FIRST: u16 = 20_000;
const BLOCKS: u16 = 24;
/// Ports of a block. The first says that the block is taken.
const BLOCK: u16 = 500;

static OWN: Mutex<OwnBlocks> = Mutex::new(OwnBlocks {
    blocks: VecDeque::new(),
    left: 0..0,
});

/// The blocks of this process.
struct OwnBlocks {
    /// The listeners on their first ports. Ports are given from the last block.
    blocks: VecDeque<TcpListener>,
    /// The ports of the last block that were not given yet.
    left: Range<u16>,
}

impl OwnBlocks {
    /// Goes on with another block: one that no process has, or else the one that this process took first.
    fn next_block(&mut self) {
        let listen = |block: u16| {
            let first = FIRST + block * BLOCK;
            TcpListener::bind((Ipv4Addr::LOCALHOST, first)).ok()
        };
        let block = (0..BLOCKS)
            .find_map(listen)
            .or_else(|| self.blocks.pop_front())
            .expect("a block of ports that no other process has");
        let first = block.local_addr().unwrap().port();
        self.left = first + 1..first + BLOCK;
        self.blocks.push_back(block);
    }
}

/// The first of `count` ports in a row, each of them free.
pub(crate) fn ports(count: u16) -> u16 {
    let mut own = OWN.lock();
    for _ in 0..BLOCKS * BLOCK {
        if own.left.len() < usize::from(count) {
            own.next_block();
        }
        let first = own.left.start;
        own.left.start += count;
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
