//! stub
use crate::address::Endpoint;
use crate::error::ClientError;
#[derive(Debug, clap::Args)]
pub(crate) struct StatusArgs {}
pub(crate) fn run(_: &StatusArgs, _: &Endpoint) -> Result<u8, ClientError> { Ok(1) }
