//! The cryptography that TLS uses.

use std::sync::{Arc, LazyLock};

use rustls::crypto::{CryptoProvider, ring};

static PROVIDER: LazyLock<Arc<CryptoProvider>> =
    LazyLock::new(|| Arc::new(ring::default_provider()));

pub(super) fn provider() -> Arc<CryptoProvider> {
    PROVIDER.clone()
}
