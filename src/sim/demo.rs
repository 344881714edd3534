//! placeholder
#[derive(clap::Args, Clone, Debug)]
pub struct Settings {}
pub async fn run(_settings: Settings) -> std::io::Result<()> {
    Ok(())
}
