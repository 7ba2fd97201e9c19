//! stub
use crate::address::Endpoint;
use crate::error::ClientError;
#[derive(Debug, clap::Args)]
pub(crate) struct DoctorArgs {}
pub(crate) fn run(_: &DoctorArgs, _: &Endpoint) -> Result<u8, ClientError> { Ok(1) }
