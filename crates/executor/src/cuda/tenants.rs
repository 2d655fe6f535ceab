//! The tenants that execute plans.

use std::{
    cell::RefCell,
    ops::Deref,
    sync::{Arc, MutexGuard, PoisonError},
};

use antiphon_device::{cuda::Context, sync::Mutex};
use antiphon_fabric::{Communicator, FabricError, gpu::Tenant};

/// The tenants that execute the plans of a communicator, by the ordinals of their GPUs. They live as long as the communicator.
#[derive(Default)]
pub(super) struct Tenants(RefCell<Vec<(u32, Arc<Mutex<PlanTenant>>)>>);

/// The tenant of all plans on a GPU.
pub(super) struct PlanTenant {
    tenant: Tenant,
    /// How many sizes its plans were prepared for.
    sizes: u64,
}

impl PlanTenant {
    /// The number of a size of a plan that is being prepared, from 1: a launch need not meet behind one of the same number.
    pub(super) fn next_size(&mut self) -> u64 {
        self.sizes += 1;
        self.sizes
    }
}

impl Deref for PlanTenant {
    type Target = Tenant;

    fn deref(&self) -> &Tenant {
        &self.tenant
    }
}

impl Tenants {
    /// The tenant on the GPU of a context. All ranks call it together.
    pub(super) fn of(comm: &Communicator, context: &Context) -> Result<Arc<Mutex<PlanTenant>>, FabricError> {
        let ordinal = context.device().ordinal();
        let tenants = comm.extension(|_| Ok::<_, FabricError>(Self::default()))?;
        let known =
            tenants.0.borrow().iter().find(|(gpu, _)| *gpu == ordinal).map(|(_, tenant)| tenant.clone());
        let all = comm.exchange_objects(&known.is_some())?;
        if let Some(rank) = all.iter().position(|&theirs| theirs != known.is_some()) {
            return Err(FabricError::invalid(format!(
                "rank {} has plans on GPU {ordinal} {}, and rank {rank} {}: each rank loads all of its plans on one GPU",
                comm.rank(),
                if known.is_some() { "already" } else { "for the first time" },
                if known.is_some() { "for the first time" } else { "already" },
            )));
        }
        if let Some(known) = known {
            return Ok(known);
        }
        let tenant = Tenant::with_one_channel(comm, context, Tenant::LEAST_STAGING_BYTES)?;
        let made = Arc::new(Mutex::new(PlanTenant { tenant, sizes: 0 }));
        tenants.0.borrow_mut().push((ordinal, made.clone()));
        Ok(made)
    }
}

/// The tenant, for one call.
pub(super) fn lock(tenant: &Mutex<PlanTenant>) -> MutexGuard<'_, PlanTenant> {
    tenant.lock().unwrap_or_else(PoisonError::into_inner)
}
