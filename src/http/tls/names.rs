//! The names in a certificate.

use std::sync::Arc;

use rustls::pki_types::CertificateDer;
use webpki::EndEntityCert;

/// The subject alternative names of a client's verified certificate: DNS names, and URIs such as SPIFFE ids. Requests of
/// such a client's connection have it among their extensions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientNames(Arc<[Box<str>]>);

impl ClientNames {
    pub fn new<'n>(names: impl IntoIterator<Item = &'n str>) -> Self {
        Self(names.into_iter().map(Box::from).collect())
    }

    /// The names in a certificate; none if it cannot be read.
    pub(super) fn of(certificate: &CertificateDer<'_>) -> Self {
        let Ok(parsed) = EndEntityCert::try_from(certificate) else {
            return Self::default();
        };
        Self::new(parsed.valid_dns_names().chain(parsed.valid_uri_names()))
    }

    pub fn iter(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|name| &**name)
    }

    /// Whether `name` is one of them. DNS names are compared without regard to case.
    pub fn has(&self, name: &str) -> bool {
        self.iter().any(|own| {
            if own.contains("://") {
                own == name
            } else {
                own.eq_ignore_ascii_case(name)
            }
        })
    }

    /// Whether one of them is allowed; with no list each certificate is.
    pub fn are_allowed(&self, allowed: &[String]) -> bool {
        allowed.is_empty() || allowed.iter().any(|name| self.has(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_found_as_it_is_and_dns_names_in_any_case() {
        let names = ClientNames::new(["Gateway.example.com", "spiffe://example.com/ns/prod"]);
        assert!(names.has("gateway.EXAMPLE.com"));
        assert!(names.has("spiffe://example.com/ns/prod"));
        assert!(!names.has("spiffe://example.com/ns/PROD"));
        assert!(!names.has("spiffe://example.com/ns/prod/x"));
        assert!(!names.has("example.com"));
    }

    #[test]
    fn without_a_list_every_certificate_is_allowed() {
        let names = ClientNames::new(["a"]);
        let list = |names: &[&str]| {
            names
                .iter()
                .map(|name| (*name).to_owned())
                .collect::<Vec<_>>()
        };
        assert!(names.are_allowed(&[]));
        assert!(ClientNames::default().are_allowed(&[]));
        assert!(names.are_allowed(&list(&["b", "a"])));
        assert!(!names.are_allowed(&list(&["b"])));
        assert!(!ClientNames::default().are_allowed(&list(&["b"])));
    }
}
