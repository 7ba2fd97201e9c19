//! One call of the `bash` tool, from the arguments that a model wrote to the text that it reads.
use std::path::PathBuf;
use std::sync::Arc;

use dsh_policy::policy::PolicyRequest;
use dsh_policy::request::{BashExecRequest, EnvMap};
use dsh_policy::{BashRunResult, ByteString, SandboxMode};
use serde::Serialize;
use serde_json::Value;

use super::arguments::BashArguments;
use super::environment::{CallContext, EnvironmentRegistry};
use super::error::ToolError;
use super::escalate::{self, Approver, EscalationRecord, Route};
use super::render;
use super::schema::Offer;
use crate::connection::{Connection, Event};

/// Keeps the record of escalations.
pub type Recorder = dyn Fn(&EscalationRecord) + Send + Sync;

/// What the tool is made of, beside the connection.
#[derive(Clone)]
pub struct Composition {
    /// Who sets the `DSH_*` variables.
    pub environment: EnvironmentRegistry,
    /// Who asks the user; without one no wider mode is offered.
    pub approver: Option<Arc<dyn Approver>>,
    /// Hears of every escalation.
    pub record: Arc<Recorder>,
}

impl std::fmt::Debug for Composition {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Composition")
            .field("environment", &self.environment)
            .field("asks", &self.approver.is_some())
            .finish_non_exhaustive()
    }
}

/// Where a call comes from. Two sessions never share anything of it.
#[derive(Clone, Debug, Default)]
pub struct Call {
    /// Root of the workspace, absolute. A relative `workdir` is below it.
    pub workspace: PathBuf,
    /// The session's own mode; none is the deployment's default.
    pub mode: Option<SandboxMode>,
    /// The agent that a question to the user is asked for.
    pub agent: Option<String>,
    /// The session.
    pub context: CallContext,
}

/// The canonical value of a call.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "camelCase")]
pub enum BashValue {
    /// The command has ended.
    Foreground(Box<BashRunResult>),
}

/// A call that has a result.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// For programs.
    pub value: BashValue,
    /// For the model.
    pub text: String,
}

/// The tool on one connection.
#[derive(Clone, Debug)]
pub struct BashTool {
    connection: Connection,
    composition: Composition,
}

impl BashTool {
    /// The tool.
    #[must_use]
    pub fn new(connection: Connection, composition: Composition) -> Self {
        Self {
            connection,
            composition,
        }
    }

    /// What the arguments may ask for.
    #[must_use]
    pub fn offer(&self) -> Offer {
        Offer {
            background: false,
            escalation: self.composition.approver.is_some(),
        }
    }

    /// Carries out a call; `on_event` hears of what happens meanwhile. Dropping the future ends the command.
    ///
    /// # Errors
    /// [`ToolError`]; then nothing ran, or its fate is unknown. A command that fails is an answer.
    pub async fn call(
        &self,
        call: &Call,
        arguments: &Value,
        mut on_event: impl FnMut(&Event),
    ) -> Result<Answer, ToolError> {
        let arguments = BashArguments::parse(arguments)?;
        if arguments.background {
            return Err(ToolError::BackgroundDisabled);
        }
        let mut request = self.request(call, &arguments)?;
        if let Some(escalation) = &arguments.escalation {
            let current = self.connection.resolve(request.clone()).await?.sandbox_policy.mode;
            let route = Route {
                approver: self.composition.approver.as_deref(),
                agent: call.agent.as_deref(),
                record: self.composition.record.as_ref(),
            };
            let granted = escalate::decide(&arguments.command, escalation, current, route).await?;
            // The mode only: root and every other axis stay what they are.
            request.sandbox_policy.get_or_insert_default().mode = Some(granted);
        }
        let mut running = self.connection.start(request).await?;
        while let Some(event) = running.next_event().await {
            on_event(&event);
        }
        Ok(self.answer(running.result().await?))
    }

    /// The same until `aborted` is ready; then the command is ended.
    ///
    /// # Errors
    /// [`ToolError::Aborted`] in that case, otherwise as for [`BashTool::call`].
    pub async fn call_until(
        &self,
        call: &Call,
        arguments: &Value,
        on_event: impl FnMut(&Event),
        aborted: impl Future<Output = ()>,
    ) -> Result<Answer, ToolError> {
        tokio::select! {
            biased;
            () = aborted => Err(ToolError::Aborted),
            answer = self.call(call, arguments, on_event) => answer,
        }
    }

    fn request(&self, call: &Call, arguments: &BashArguments) -> Result<BashExecRequest, ToolError> {
        let managed: EnvMap = self
            .composition
            .environment
            .resolve(&call.context)?
            .into_iter()
            .map(|(key, value)| (ByteString::from(key.as_str()), ByteString::from(value.as_str())))
            .collect();
        Ok(BashExecRequest {
            command: arguments.command.as_str().into(),
            description: Some(arguments.description.clone()),
            workdir: arguments.workdir.as_deref().map(ByteString::from),
            timeout_ms: arguments.timeout_ms,
            dsh_env: Some(managed),
            session: call.context.session.clone(),
            sandbox_policy: Some(PolicyRequest {
                mode: call.mode,
                workspace_root: Some(call.workspace.as_path().into()),
                ..PolicyRequest::default()
            }),
            ..BashExecRequest::default()
        })
    }

    fn answer(&self, result: BashRunResult) -> Answer {
        let offered = self.offer().escalation && result.sandbox.mode < SandboxMode::DangerFullAccess;
        Answer {
            text: render::render_result(&result, offered),
            value: BashValue::Foreground(Box::new(result)),
        }
    }
}
