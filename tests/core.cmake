ekv_test(machine_memory_test LABEL unit SOURCES unit/machine_memory_test.cpp LIBS ekv_base)
# The engine's core: settings, queues, pages, prefix cache, scheduler, packer.
foreach(name config page_pool pair_table prefix_cache host_store offload plan_fidelity step_planner step_cost scheduler pack_step sequence)
  ekv_test(${name}_test LABEL unit SOURCES unit/${name}_test.cpp LIBS ekv_core)
endforeach()
foreach(name kv_model host_store_model scheduler_property)
  ekv_test(${name}_test LABEL property SOURCES property/${name}_test.cpp LIBS ekv_core)
endforeach()
