//! A ZeroMQ endpoint: `tcp://HOST:PORT`.

use std::fmt;
use std::str::FromStr;

/// A host, resolved anew for each connection, and a port.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint {
    /// A name or an address, without brackets.
    pub host: String,
    pub port: u16,
}

impl FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |what: &str| format!("`{text}` is {what}; write tcp://HOST:PORT");
        let Some(rest) = text.strip_prefix("tcp://") else {
            return Err(wrong("not a TCP endpoint"));
        };
        let (host, port) = rest
            .rsplit_once(':')
            .ok_or_else(|| wrong("without a port"))?;
        let host = host
            .strip_prefix('[')
            .and_then(|host| host.strip_suffix(']'))
            .unwrap_or(host);
        if host.is_empty() || host.contains(['/', '[', ']', ' ']) {
            return Err(wrong("without a host"));
        }
        match port.parse() {
            Ok(port) if port > 0 => Ok(Self {
                host: host.to_owned(),
                port,
            }),
            _ => Err(wrong("without a port")),
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "tcp://[{}]:{}", self.host, self.port)
        } else {
            write!(f, "tcp://{}:{}", self.host, self.port)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_reads_as_it_is_written() {
        for text in [
            "tcp://engine-3:5557",
            "tcp://10.0.0.1:1",
            "tcp://[::1]:65535",
            "tcp://*:9",
        ] {
            assert_eq!(text.parse::<Endpoint>().unwrap().to_string(), text);
        }
        for text in [
            "ipc://engine.sock",
            "tcp://host",
            "tcp://:5",
            "tcp://h:0",
            "tcp://h:x",
            "h:5",
        ] {
            assert!(text.parse::<Endpoint>().unwrap_err().contains(text));
        }
    }
}
