//! stub
use crate::address::Endpoint;
use crate::error::ClientError;
#[derive(Debug, clap::Args)]
pub(crate) struct ConfigArgs {}
pub(crate) fn run(_: &ConfigArgs, _: &Endpoint) -> Result<u8, ClientError> { Ok(1) }
