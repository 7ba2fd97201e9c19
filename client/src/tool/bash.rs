//! One call of the `bash` tool, from the arguments that a model wrote to the text that it reads.
use std::path::PathBuf;
use std::sync::Arc;

use dsh_policy::error::ErrorCode;
use dsh_policy::policy::PolicyRequest;
use dsh_policy::request::BashExecRequest;
use dsh_policy::{BashRunResult, ByteString, SandboxMode};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::arguments::BashArguments;
use super::environment::{CallContext, EnvironmentRegistry};
use super::error::ToolError;
use super::escalate::{self, Approver, Audit, Escalation, EscalationRecord, Modes, Route};
use super::render;
use super::schema::Offer;
use super::task::{TaskStarter, started_text};
use crate::ClientError;
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
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum BashValue {
    /// The command has ended.
    Foreground(Box<BashRunResult>),
    /// The command is a task now.
    Background {
        /// Its name.
        task_id: String,
    },
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
#[derive(Clone)]
pub struct BashTool {
    connection: Connection,
    composition: Composition,
    audit: Option<Arc<dyn Audit>>,
    tasks: Option<Arc<dyn TaskStarter>>,
    background_enabled: bool,
}

impl std::fmt::Debug for BashTool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BashTool")
            .field("connection", &self.connection)
            .field("composition", &self.composition)
            .field("offer", &self.offer())
            .finish_non_exhaustive()
    }
}

impl BashTool {
    /// The tool.
    #[must_use]
    pub fn new(connection: Connection, composition: Composition) -> Self {
        Self {
            connection,
            composition,
            audit: None,
            tasks: None,
            background_enabled: true,
        }
    }

    /// With a record of escalations that lasts: an approval that it does not keep does not count.
    #[must_use]
    pub fn with_audit(mut self, audit: Arc<dyn Audit>) -> Self {
        self.audit = Some(audit);
        self
    }

    /// With background tasks.
    #[must_use]
    pub fn with_tasks(mut self, tasks: Arc<dyn TaskStarter>) -> Self {
        self.tasks = Some(tasks);
        self
    }

    /// `enableRunInBackground` of the deployment.
    #[must_use]
    pub fn enable_run_in_background(mut self, enabled: bool) -> Self {
        self.background_enabled = enabled;
        self
    }

    /// What the arguments may ask for.
    #[must_use]
    pub fn offer(&self) -> Offer {
        Offer {
            background: self.background_enabled && self.tasks.is_some(),
            escalation: self
                .composition
                .approver
                .as_ref()
                .is_some_and(|approver| approver.is_reachable()),
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
        on_event: impl FnMut(&Event),
    ) -> Result<Answer, ToolError> {
        self.call_until(call, arguments, on_event, std::future::pending()).await
    }

    /// The same until `aborted` is ready; then the command is ended, and this returns when nothing of it is left.
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
        let mut aborted = std::pin::pin!(aborted);
        let arguments = BashArguments::parse(arguments)?;
        let tasks = self.task_starter(&arguments)?;
        let request = tokio::select! {
            biased;
            () = &mut aborted => return Err(ToolError::Aborted),
            request = self.prepare(call, &arguments, tasks) => request?,
        };
        if let Some(tasks) = tasks {
            let task_id = tasks.start(request).await?;
            return Ok(Answer {
                text: started_text(&task_id),
                value: BashValue::Background { task_id },
            });
        }
        let result = self.run(request.clone(), on_event, aborted).await?;
        if result.aborted {
            return Err(ToolError::Aborted);
        }
        Ok(self.answer(result, request, call).await)
    }

    /// Everything that comes before a command runs. It may take as long as a user takes to answer.
    async fn prepare(
        &self,
        call: &Call,
        arguments: &BashArguments,
        tasks: Option<&dyn TaskStarter>,
    ) -> Result<BashExecRequest, ToolError> {
        if let Some(tasks) = tasks {
            let preflight = tasks.preflight(call.context.session.as_deref()).await;
            preflight.map_err(ToolError::BackgroundUnavailable)?;
        }
        let request = self.request(call, arguments)?;
        match &arguments.escalation {
            Some(escalation) => self.escalated(request, escalation, &arguments.command, call).await,
            None => Ok(request),
        }
    }

    /// `request` in the mode that is asked for, when it may have it. Root and every other axis stay what they are.
    async fn escalated(
        &self,
        request: BashExecRequest,
        escalation: &Escalation,
        command: &str,
        call: &Call,
    ) -> Result<BashExecRequest, ToolError> {
        let wider = in_mode(request.clone(), escalation.target);
        let modes = Modes {
            current: self.mode_of(request).await?,
            reachable: self.mode_of(wider.clone()).await?,
        };
        let route = Route {
            approver: self.composition.approver.as_deref(),
            agent: call.agent.as_deref(),
            session: call.context.session.as_deref(),
            record: self.composition.record.as_ref(),
            audit: self.audit.as_deref(),
        };
        escalate::decide(command, escalation, modes, route).await?;
        Ok(wider)
    }

    /// The mode that a request would run in, after the defaults and bounds of the deployment.
    async fn mode_of(&self, mut request: BashExecRequest) -> Result<SandboxMode, ClientError> {
        // Whoever starts the task says whether it can be one.
        request.background = false;
        Ok(self.connection.resolve(request).await?.sandbox_policy.mode)
    }

    /// Runs a command to its end, which `aborted` brings about early.
    async fn run(
        &self,
        request: BashExecRequest,
        mut on_event: impl FnMut(&Event),
        mut aborted: std::pin::Pin<&mut impl Future<Output = ()>>,
    ) -> Result<BashRunResult, ToolError> {
        let mut running = tokio::select! {
            biased;
            () = &mut aborted => return Err(ToolError::Aborted),
            running = self.connection.start(request) => running?,
        };
        let mut is_aborted = false;
        loop {
            tokio::select! {
                () = &mut aborted, if !is_aborted => {
                    is_aborted = true;
                    running.cancel();
                }
                event = running.next_event() => match event {
                    Some(event) => on_event(&event),
                    None => break,
                },
            }
        }
        match running.result().await {
            Err(ClientError::Exec(error)) if error.code == ErrorCode::Cancelled => Err(ToolError::Aborted),
            result => Ok(result?),
        }
    }

    /// Who starts the call in the background; nobody when it waits for its end.
    fn task_starter(&self, arguments: &BashArguments) -> Result<Option<&dyn TaskStarter>, ToolError> {
        if !arguments.background {
            return Ok(None);
        }
        if !self.background_enabled {
            return Err(ToolError::BackgroundDisabled);
        }
        let missing = "no task runtime is composed; run the command in the foreground";
        let tasks = self.tasks.as_deref();
        tasks
            .map(Some)
            .ok_or_else(|| ToolError::BackgroundUnavailable(missing.into()))
    }

    fn request(&self, call: &Call, arguments: &BashArguments) -> Result<BashExecRequest, ToolError> {
        let managed = self.composition.environment.resolve(&call.context)?;
        Ok(BashExecRequest {
            command: arguments.command.as_str().into(),
            description: Some(arguments.description.clone()),
            workdir: arguments.workdir.as_deref().map(ByteString::from),
            timeout_ms: arguments.timeout_ms,
            dsh_env: Some(managed),
            session: call.context.session.clone(),
            background: arguments.background,
            sandbox_policy: Some(PolicyRequest {
                mode: call.mode,
                workspace_root: Some(call.workspace.as_path().into()),
                ..PolicyRequest::default()
            }),
            ..BashExecRequest::default()
        })
    }

    async fn answer(&self, result: BashRunResult, request: BashExecRequest, call: &Call) -> Answer {
        let offered = result.sandbox.denied == Some(true) && self.offers_more(request, result.sandbox.mode, call).await;
        Answer {
            text: render::render_result(&result, offered),
            value: BashValue::Foreground(Box::new(result)),
        }
    }

    /// Whether asking for more than `mode` could succeed: there is somebody to ask, somebody to ask for, and the deployment has a wider mode.
    async fn offers_more(&self, request: BashExecRequest, mode: SandboxMode, call: &Call) -> bool {
        if !self.offer().escalation || call.agent.is_none() {
            return false;
        }
        let widest = self.mode_of(in_mode(request, SandboxMode::DangerFullAccess)).await;
        widest.is_ok_and(|widest| widest.is_strictly_wider_than(mode))
    }
}

fn in_mode(mut request: BashExecRequest, mode: SandboxMode) -> BashExecRequest {
    request.sandbox_policy.get_or_insert_default().mode = Some(mode);
    request
}
