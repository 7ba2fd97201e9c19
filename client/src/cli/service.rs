//! stub
use crate::address::Endpoint;
use crate::error::ClientError;
#[derive(Debug, clap::Args)]
pub(crate) struct ServiceArgs {}
pub(crate) fn run(_: &ServiceArgs, _: &Endpoint) -> Result<u8, ClientError> { Ok(1) }
