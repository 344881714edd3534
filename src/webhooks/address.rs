//! Which addresses a webhook must not be sent to, because only hosts inside are meant to reach them. Pure.
//!
//! A tenant's operator chooses the name of an endpoint, and whoever owns that name chooses its address. Without these
//! rules a webhook could be sent to this host's own ports, to others of the private network, or to the service that
//! gives a cloud machine its credentials.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Metadata services at addresses that are otherwise public: Azure's, and Oracle's older one.
const PUBLIC_METADATA: [Ipv4Addr; 2] = [
    Ipv4Addr::new(168, 63, 129, 16),
    Ipv4Addr::new(192, 0, 0, 192),
];

/// What an address is, if it is not public.
pub(super) fn refusal(address: IpAddr) -> Option<&'static str> {
    match address.to_canonical() {
        IpAddr::V4(address) => refusal_v4(address),
        IpAddr::V6(address) => refusal_v6(address),
    }
}

fn refusal_v4(address: Ipv4Addr) -> Option<&'static str> {
    let [a, b, c, _] = address.octets();
    Some(match (a, b, c) {
        _ if PUBLIC_METADATA.contains(&address) => "a metadata service",
        (127, ..) => "a loopback address",
        (0, ..) => "this host's own network",
        (10, ..) | (172, 16..=31, _) | (192, 168, _) => "a private address",
        // Alibaba's metadata service is among them.
        (100, 64..=127, _) => "a provider's own address",
        // The metadata services of most clouds are 169.254.169.254.
        (169, 254, _) => "a link-local address",
        (192, 0, 0 | 2) | (192, 88, 99) | (198, 18..=19, _) | (198, 51, 100) | (203, 0, 113) => {
            "a reserved address"
        }
        (224..=239, ..) => "a multicast address",
        (240.., ..) => "a reserved address",
        _ => return None,
    })
}

fn refusal_v6(address: Ipv6Addr) -> Option<&'static str> {
    let segments = address.segments();
    Some(match segments {
        [0, 0, 0, 0, 0, 0, 0, 0] => "this host's own network",
        [0, 0, 0, 0, 0, 0, 0, 1] => "a loopback address",
        // Ways to write an IPv4 address: as the last 32 bits, over NAT64, over 6to4.
        [0, 0, 0, 0, 0, 0, high, low] | [0x64, 0xff9b, 0, 0, 0, 0, high, low] => {
            return refusal_v4(v4(high, low));
        }
        [0x2002, high, low, ..] => return refusal_v4(v4(high, low)),
        [0x64, 0xff9b, 1, ..] => "a private address",
        // AWS' metadata service is among them.
        [0xfc00..=0xfdff, ..] => "a private address",
        [0xfe80..=0xfebf, ..] => "a link-local address",
        [0xfec0..=0xfeff, ..] => "a private address",
        [0xff00..=0xffff, ..] => "a multicast address",
        // Teredo, benchmarks, ORCHID, documentation, and what discards.
        [0x2001, 0..=0x01ff | 0x0db8, ..] | [0x3fff, ..] | [0x100, 0, 0, ..] => {
            "a reserved address"
        }
        // What is assigned to hosts of the Internet.
        [0x2000..=0x3fff, ..] => return None,
        _ => "a reserved address",
    })
}

fn v4(high: u16, low: u16) -> Ipv4Addr {
    let [a, b] = high.to_be_bytes();
    let [c, d] = low.to_be_bytes();
    Ipv4Addr::new(a, b, c, d)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn only_public_addresses_are_taken() {
        let check = |text: &str, is_public: bool| {
            let found = refusal(text.parse().unwrap());
            assert_eq!(found.is_none(), is_public, "{text}: {found:?}");
        };
        for public in [
            "1.1.1.1",
            "8.8.8.8",
            "172.15.0.1",
            "172.32.0.1",
            "100.63.0.1",
            "100.128.0.1",
            "192.0.1.1",
            "223.255.255.1",
            "2606:4700::1111",
            "2a00:1450::1",
            "64:ff9b::101:101",
            "::ffff:1.1.1.1",
        ] {
            check(public, true);
        }
        for inside in [
            "127.0.0.1",
            "127.1.2.3",
            "0.0.0.0",
            "10.1.2.3",
            "172.16.0.1",
            "172.31.255.255",
            "192.168.1.1",
            "100.100.100.200",
            "169.254.169.254",
            "168.63.129.16",
            "192.0.0.192",
            "198.18.0.1",
            "224.0.0.1",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "::127.0.0.1",
            "::ffff:0:127.0.0.1",
            "64:ff9b::7f00:1",
            "64:ff9b::a9fe:a9fe",
            "64:ff9b:1::1",
            "2002:7f00:1::",
            "2002:c0a8:101::1",
            "2001:0:4136:e378:8000:63bf:3fff:fdd2",
            "2001:db8::1",
            "fc00::1",
            "fd00:ec2::254",
            "fe80::1",
            "fec0::1",
            "ff02::1",
            "4000::1",
            "100::1",
        ] {
            check(inside, false);
        }
    }

    proptest! {
        /// Against what the standard library knows of addresses.
        #[test]
        fn nothing_that_the_library_calls_internal_is_taken(bits in any::<u32>()) {
            let address = Ipv4Addr::from_bits(bits);
            let is_internal = address.is_loopback()
                || address.is_private()
                || address.is_link_local()
                || address.is_multicast()
                || address.is_broadcast()
                || address.is_unspecified()
                || address.is_documentation();
            prop_assert!(!is_internal || refusal(address.into()).is_some(), "{}", address);
            // However it is written.
            let own = refusal(address.into());
            prop_assert_eq!(refusal(address.to_ipv6_mapped().into()), own);
            let [a, b, c, d] = address.octets();
            let pair = |high: u8, low: u8| u16::from_be_bytes([high, low]);
            let nat = Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, pair(a, b), pair(c, d));
            prop_assert_eq!(refusal(nat.into()), own);
        }

        #[test]
        fn ipv6_that_the_library_calls_internal_is_not_taken(bits in any::<u128>(), first in any::<u8>()) {
            for address in [bits, (bits & (u128::MAX >> 8)) | u128::from(first) << 120].map(Ipv6Addr::from_bits) {
                let is_internal = address.is_loopback()
                    || address.is_unique_local()
                    || address.is_unicast_link_local()
                    || address.is_multicast()
                    || address.is_unspecified();
                prop_assert!(!is_internal || refusal(address.into()).is_some(), "{}", address);
            }
        }
    }
}
