//! Why a client could not get an answer.
use dsh_policy::error::{ErrorCode, ExecError};

/// A failure between the caller and the daemon, or one that the daemon reports.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The daemon says that nothing ran, or that the fate of the command is unknown.
    #[error("{0}")]
    Exec(ExecError),
    /// No daemon can be reached, with what was tried.
    #[error("{0}")]
    Unreachable(String),
    /// The daemon said something that is not in the protocol.
    #[error("the daemon broke the protocol: {0}; is it of another version? `dsh-exec status` tells")]
    Protocol(String),
    /// The connection ended before the answer; what became of the command is not known.
    #[error("the daemon closed the connection before the answer; the fate of the command is unknown")]
    Lost,
    /// Something on the client's side cannot be used.
    #[error("{0}")]
    Local(String),
    /// Nobody reads this process's standard output any more; only the command line gives this.
    #[error("nobody reads standard output any more")]
    OutputClosed,
}

impl ClientError {
    /// The failure as the daemon's kind of error, for programs.
    #[must_use]
    pub fn into_exec_error(self) -> ExecError {
        match self {
            Self::Exec(error) => error,
            Self::Lost => ExecError::new(ErrorCode::Unknown, self.to_string()),
            Self::Protocol(_) => ExecError::new(ErrorCode::ProtocolMismatch, self.to_string()),
            Self::Unreachable(_) => ExecError::new(ErrorCode::Unreachable, self.to_string()),
            Self::Local(_) | Self::OutputClosed => ExecError::new(ErrorCode::InvalidRequest, self.to_string()),
        }
    }
}

impl From<ExecError> for ClientError {
    fn from(error: ExecError) -> Self {
        Self::Exec(error)
    }
}
