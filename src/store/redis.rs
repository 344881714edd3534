//! The store in Redis.
mod settings;
pub use settings::Breaker;
pub use settings::Mode;
pub use settings::Settings;
pub use settings::Tls;
