//! What the command line says of the configuration: values instead of the file's, or without one.

/// The flags of `serve` and `check`.
#[derive(Clone, Debug, Default)]
pub struct Flags {
    /// `--worker`: URLs, added to those of the file.
    pub workers: Vec<String>,
    /// `--listen`
    pub listen: Option<String>,
    /// `--admin-listen`
    pub admin_listen: Option<String>,
    /// `--peers-listen`
    pub peers_listen: Option<String>,
    /// `--endpoint-picker-listen`
    pub endpoint_picker_listen: Option<String>,
    /// `--peer`: addresses, added to those of the file.
    pub peers: Vec<String>,
    /// `--allow-missing-files`: of `check`, for a machine without the secrets and certificates.
    pub allow_missing_files: bool,
}
