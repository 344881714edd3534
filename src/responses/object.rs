//! Edits of a stored Response object. Pure.

use super::members::{Members, put_read};

/// A Response object with its output, which is stored separately.
pub(super) fn with_output(response: &[u8], output: &[u8]) -> Vec<u8> {
    let open = response.strip_suffix(b"}").unwrap_or(response);
    [open, br#","output":"#, output, b"}"].concat()
}

/// A Response object with another value for one member.
pub(super) fn with_member(response: &[u8], name: &str, value: &str) -> Vec<u8> {
    let members = Members::of_bytes(response);
    let mut out = Vec::with_capacity(response.len() + 16);
    out.push(b'{');
    for (key, old) in members.iter().flat_map(Members::iter) {
        put_read(&mut out, key, if key == name { value } else { old });
    }
    out.push(b'}');
    out
}
