//! The address of a listener, as a configuration or an argument gives it. Pure.

use std::net::SocketAddr;

/// The address of a listener: `:8080` is all addresses, `localhost:8080` this host.
pub fn listen_address(listen: &str) -> Result<SocketAddr, String> {
    let full = match listen.rsplit_once(':') {
        Some(("", port)) => format!("0.0.0.0:{port}"),
        Some(("localhost", port)) => format!("127.0.0.1:{port}"),
        _ => listen.to_owned(),
    };
    full.parse().map_err(|_| {
        format!(
            "`{listen}` is not an address and port such as `:8080`, `127.0.0.1:8080` or `localhost:8080`"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_a_port_and_may_leave_out_the_host() {
        let check = |text, expected: Option<&str>| {
            let found = listen_address(text).ok().map(|address| address.to_string());
            assert_eq!(found.as_deref(), expected, "{text}");
        };
        check(":8080", Some("0.0.0.0:8080"));
        check("localhost:8080", Some("127.0.0.1:8080"));
        check("[::]:8080", Some("[::]:8080"));
        check("10.0.0.1:0", Some("10.0.0.1:0"));
        for wrong in ["", "8080", "foo", "foo:8080", "localhost", ":65536"] {
            check(wrong, None);
        }
    }
}
